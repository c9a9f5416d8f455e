#!/usr/bin/env bash
# NCCL between ranks that share one GPU, tried in at most six minutes, for a reader who is elsewhere.
#
#     tests/gpu/one_gpu.sh [REPORT]          # default: runs/one-gpu.txt
#
# PYTHON is one that has CuPy, mpi4py, pytest and hypothesis, and NCCL 2.30 or newer, in its environment or in LD_PRELOAD;
# default: .venv's. Each step has a limit, and what fails stops none of the others. The report is there line by line, and
# its last lines say how each step ended. No setting of the GPU is changed: the MPS daemon is a private one.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
python=${PYTHON:-$PWD/.venv/bin/python} report=${1:-runs/one-gpu.txt} work=$(mktemp -d) end=$((SECONDS + 360)) ends=""
mkdir -p "$(dirname "$report")"
report=$(cd "$(dirname "$report")" && pwd)/$(basename "$report")
: >"$report"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 NCCL_DEBUG=${NCCL_DEBUG:-WARN}

try() {     # NAME SECONDS COMMAND...
    local name=$1 most=$2 left=$((end - SECONDS)) begin=$SECONDS status
    shift 2
    if [ "$left" -lt 5 ]; then
        status="not started: six minutes are over"
    else
        printf '\n==== %s: %s\n' "$name" "$*" >>"$report"
        timeout -s ABRT -k 10 $((most < left ? most : left)) "$@" >>"$report" 2>&1
        status="status $?, $((SECONDS - begin)) s"
    fi
    ends="$ends$name: $status"$'\n'
    echo "$name: $status"
}

theorems() {    # NAME SECONDS TESTS...
    local name=$1 most=$2
    shift 2
    CUDA_REPORT=$report CUDA_TESTS_UNTIL=$("$python" -c "import time; print(time.monotonic() + $most - 10)") \
        try "$name" "$most" "$python" -X faulthandler -m pytest -q -p tools.gpu_report -p no:cacheprovider --tb=short \
        --maxfail 6 --cuda "$@"
}

model="--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --global-batch-size 8
    --train-iters 6 --lr 0.001 --vocab-size 300 --log-interval 1 --eval-iters 0 --split 8,2 --hidden-dropout 0
    --attention-dropout 0 --device cuda --distributed-backend nccl --data-path $work/text.txt"
"$python" -c "
import random
random.seed(1)
words = 'the ranks of a group add up what each of them has computed and all get the same sum'.split()
print(*('<|endoftext|>'.join(' '.join(random.choices(words, k=40)) for _ in range(400)) for _ in range(1)))" >"$work/text.txt"

run() {         # RANKS OPTIONS...
    local n=$1
    shift
    # shellcheck disable=SC2086
    "$python" -m mpi_impl.launch -n "$n" --timeout 60 -m mpi_impl.pretrain_gpt $model "$@"
}
export -f run
export python model

try versions 60 "$python" -c "
import sys, cupy
from cupy.cuda import nccl
from mpi4py import MPI
from mpi_impl.comm.device import sharing_of
print(sys.version, MPI.Get_library_version().split(chr(10))[0], f'NCCL {nccl.get_version()}', sep=chr(10))
print('multiprocessors, MPS:', sharing_of(0))
cupy.show_config()"
try nvidia-smi 20 nvidia-smi

control=$(command -v nvidia-cuda-mps-control || find /usr/local/nvidia /usr/bin -name nvidia-cuda-mps-control 2>/dev/null | head -n 1)
daemon="without MPS, which is not here"
if [ -n "$control" ]; then
    export CUDA_MPS_PIPE_DIRECTORY=$work/pipes CUDA_MPS_LOG_DIRECTORY=$work/logs
    mkdir -p "$work/pipes" "$work/logs"
    try "MPS daemon" 20 env -u LD_PRELOAD "$control" -d
    daemon="with MPS"
fi
try "is MPS there" 30 "$python" -c "from mpi_impl.comm.device import sharing_of; print('multiprocessors, MPS:', sharing_of(0))"
theorems "theorems, $daemon" 150 tests/gpu/test_nccl.py
for precision in "--dtype float32" "--bf16" "--dtype float32 --zero-stage 2 --tensor-model-parallel-size 1"; do
    try "verified run $precision, $daemon" 45 bash -c "run 4 --tensor-model-parallel-size 2 --sequence-parallel --verify $precision"
done
try "eight ranks, $daemon" 60 bash -c "run 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --verify --bf16"
if [ -n "$control" ]; then
    try "MPS says" 10 bash -c "tail -n 20 $work/logs/*.log"
    try "MPS daemon ends" 20 bash -c "echo quit | env -u LD_PRELOAD '$control'"
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    try "a daemon of the launcher" 60 "$python" -m mpi_impl.launch --mps -n 4 --timeout 60 -m mpi_impl.pretrain_gpt $model --verify
fi
theorems "theorems, without MPS" 60 "tests/gpu/test_nccl.py::test_collectives[float32-2]" \
    "tests/gpu/test_nccl.py::test_posted_collectives[bfloat16-2]" tests/gpu/test_nccl.py::test_a_posted_sum_runs_beside_a_kernel
sanitizer=$(command -v compute-sanitizer || find /usr/local/cuda* /opt -name compute-sanitizer -type f 2>/dev/null | head -n 1)
if [ -n "$sanitizer" ]; then
    SHARDLAB_TEST_CUDA=1 try compute-sanitizer 60 "$(dirname "$python")/mpiexec" -n 2 "$sanitizer" --error-exitcode 9 "$python" -c "
from mpi_impl.comm.group import world
from tests.gpu.test_nccl import POSTS, check, collectives_are_the_textbooks, posted_are_the_textbooks
check(world(), collectives_are_the_textbooks, [('float32', (3, 2, 0), 'whole', 1, 0)])
check(world(), posted_are_the_textbooks, [(POSTS, 7, 'float32', 0, True)])"
fi

rm -rf "$work"
printf '\n==== how each step ended\n%s' "$ends" >>"$report"
echo "The report is in $report"
