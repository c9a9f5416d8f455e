"""PyTorch's side of cuda_step.py: a training step on a GPU in bfloat16, in the ways that PyTorch offers.

Its arguments are the sizes of a work and
  --compile HOW     `torch.compile` over the whole model: as it is by default; with `graphs`, which is its mode
                    reduce-overhead; `tuned`, which is its mode max-autotune-no-cudagraphs; or `tuned-graphs`, its mode
                    max-autotune. The last two tune without coordinate descent, which takes minutes
  --step-graph      record the whole step, with the optimizer, as one CUDA graph
  --weights FORMAT  float32, with `torch.autocast`; `masters`: the model in bfloat16, and its weights in float32 besides
                    for AdamW (as ours and Megatron's); or bfloat16, AdamW's moments, too
  --cpu             the same on the CPU, without graphs, to try it
Products in float32, if there are any, may use TF32. Attention is cuDNN's where that works, which on a Hopper is
the fastest.
"""
import argparse
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from pytorch_gpt import TorchGPT
from torch.nn.attention import SDPBackend, sdpa_kernel
from turns import serve
from works import Work

TUNED = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
GRAPHS = {"triton.cudagraphs": True}
COMPILED = {"default": {}, "graphs": GRAPHS, "tuned": TUNED, "tuned-graphs": TUNED | GRAPHS}
WEIGHTS = ("float32", "masters", "bfloat16")


class Training:
    """A model, its optimizer and one batch. A call is a step, which returns the loss; the GPU may end it later."""

    def __init__(self, options, device):
        work = Work.read(options.work)
        torch.manual_seed(0)
        with torch.device(device):
            model = TorchGPT(work)
        self.masters = [p.detach().clone() for p in model.parameters()] if options.weights == "masters" else []
        if options.weights != "float32":
            model.bfloat16()
        self.parameters = list(model.parameters())
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.optimizer = torch.optim.AdamW(self.masters or self.parameters, lr=1e-4, weight_decay=0.01, fused=True,
                                           capturable=options.step_graph and device == "cuda")
        self.loss_of = torch.compile(model, options=COMPILED[options.compile]) if options.compile else model
        self.batch = [x.to(device) for x in TorchGPT.batch(work, torch.Generator().manual_seed(0))]
        self.autocast = torch.autocast(device, torch.bfloat16) if options.weights == "float32" else nullcontext()

    def __call__(self):
        torch.compiler.cudagraph_mark_step_begin()      # tensors of the last step may be overwritten
        with self.autocast:
            loss = self.loss_of(*self.batch)
        loss.backward()
        self.update()
        return loss.detach()

    @torch.no_grad()
    def update(self):
        """Move the weights, and drop the gradients."""
        if self.masters:
            torch._foreach_copy_([master.grad for master in self.masters], [p.grad for p in self.parameters])
        self.optimizer.step()
        if self.masters:
            torch._foreach_copy_(self.parameters, self.masters)
        for p in self.parameters:
            p.grad = None


class StepGraph:
    """A step recorded as one CUDA graph. The first call records it, after three steps that compile and allocate."""

    def __init__(self, step):
        self.step, self.graph = step, None

    def __call__(self):
        if self.graph is None:
            self.record()
        else:
            self.graph.replay()

    def record(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.step()
        self.graph = graph


@contextmanager
def fast_attention(work):
    """Prefer cuDNN's attention, if it computes this work's; otherwise leave PyTorch its choice."""
    shapes = [(work.b, heads, work.s, work.h // work.a) for heads in (work.a, work.g or work.a, work.g or work.a)]
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    try:
        with sdpa_kernel(order[0]):
            qkv = [torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for shape in shapes]
            y = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=work.g > 0)
            y.backward(torch.randn_like(y))
            torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"cuDNN's attention does not work here: {error}", flush=True)
        yield
    else:
        with sdpa_kernel(order, set_priority=True):
            yield


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("work")
    parser.add_argument("--compile", choices=COMPILED)
    parser.add_argument("--weights", choices=WEIGHTS, default="float32")
    for name in ("--step-graph", "--cpu"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    training = Training(options, "cpu" if options.cpu else "cuda")
    if options.cpu:
        serve(training)
        return
    run = StepGraph(training) if options.step_graph else training

    def step():
        run()
        torch.cuda.synchronize()

    with fast_attention(Work.read(options.work)):
        serve(step)


if __name__ == "__main__":
    main()
