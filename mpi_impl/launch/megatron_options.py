"""Options of Megatron-LM that programs here do not have, and what to do about them."""
import difflib
from collections.abc import Iterable, Sequence

# They choose kernels, overlap, formats of files and logs: here no result depends on such a choice.
WITHOUT_EFFECT = frozenset("""
    --accumulate-allreduce-grads-in-fp32 --async-save --attention-backend --attention-softmax-in-fp32
    --auto-detect-ckpt-format --ckpt-format --ckpt-fully-parallel-load --cross-entropy-fusion-impl
    --cross-entropy-loss-fusion --deterministic-mode --empty-unused-memory-level --lazy-mpu-init --local-rank
    --log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm --log-timers-to-tensorboard
    --log-validation-ppl-to-tensorboard --manual-gc --manual-gc-interval --moe-grouped-gemm --moe-permute-fusion
    --moe-token-dispatcher-type --no-async-tensor-model-parallel-allreduce --no-bias-dropout-fusion
    --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-create-attention-mask-in-dataloader
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-mmap-bin-files --no-persist-layer-norm
    --no-rope-fusion --num-workers --overlap-grad-reduce --overlap-param-gather --tensorboard-log-interval
    --tensorboard-queue-size --timing-log-level --timing-log-option --tp-comm-overlap --transformer-impl
    --use-cpu-initialization --use-dist-ckpt --use-flash-attn --use-mcore-models --wandb-exp-name --wandb-project
    --wandb-save-dir""".split())

INSTEAD = dict(line.split(": ") for line in """
--batch-size: --micro-batch-size
--checkpoint-activations: --recompute-granularity full
--data-parallel-sharding-strategy: --zero-stage 1, 2 or 3
--encoder-num-layers: --num-layers
--encoder-seq-length: --seq-length
--lr-decay-samples: --lr-decay-iters
--lr-warmup-samples: --lr-warmup-iters
--model-parallel-size: --tensor-model-parallel-size
--num-virtual-stages-per-pipeline-rank: --num-layers-per-virtual-pipeline-stage
--profile: --trace
--tensorboard-dir: --metrics-file
--train-data-path: --data-path
--train-samples: --train-iters
--use-custom-fsdp: --zero-stage 3
--use-megatron-fsdp: --zero-stage 3
--use-rotary-position-embeddings: --position-embedding-type rope
--use-torch-fsdp2: --zero-stage 3
--warmup: --lr-warmup-fraction
""".split("\n")[1:-1])


def advice(unknown: Sequence[str], options: Iterable[str]) -> str:
    """Return what to do about each unknown option of a program that has these options."""
    known = {option.lstrip("-"): option for option in options}      # all have dashes in common
    dropped = [name for name in unknown if name in WITHOUT_EFFECT]
    sentences = [f"Leave out {', '.join(dropped)}: no result depends on such a choice here."] if dropped else []
    for name in unknown:
        instead, close = INSTEAD.get(name, ""), difflib.get_close_matches(name.lstrip("-"), known, n=1)
        if instead.split(" ")[0] in known.values():
            sentences.append(f"In place of {name}, write {instead}.")
        elif close and name not in dropped:
            sentences.append(f"Did you mean {known[close[0]]}?" if len(unknown) == 1 else
                             f"Instead of {name}, did you mean {known[close[0]]}?")
    return " ".join(sentences) or "Run it with --help to see every option."
