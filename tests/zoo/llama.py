"""Mistakes of the Llama family: groups of heads, the gate of the MLP, norms of queries and keys."""
from dataclasses import replace

from tests.zoo.cases import CASE, MODEL, Plan, Recompute, Theorem, in_textbook, on_ranks
from tests.zoo.entry import Bug, Entry

# Two heads of keys and values for four of queries, on four ranks: two of them hold a copy of each.
LLAMA = replace(MODEL, normalization="RMSNorm", swiglu=True, add_bias_linear=False, ffn_hidden_size=12,
                num_query_groups=2, qk_layernorm=True, position_embedding_type="rope")
GROUPS = replace(CASE, t=2, model=LLAMA)
COPIES = replace(CASE, t=4, model=LLAMA)
SQUARED = replace(CASE, t=2, model=replace(LLAMA, swiglu=False, squared_relu=True))
TRAINED = Theorem("training_theorems.training_equals_one_process", 4, (COPIES, 2, 2, 0.05, Plan(bucket_size=300)))

ENTRIES = [
    Entry("gate and up cut side by side", "computation", "TP", "after NVIDIA/Megatron-LM #520",
          "Gate and up are one matrix, so it is cut in two like any other: the first rank gets the gate alone.",
          Bug("reference.params", "return np.split(np.pad(x, padding), shards, tensor.split)[rank // tensor.copies(t)]",
              "return (np.split(np.pad(x, padding), shards, tensor.split)[rank // tensor.copies(t)]\n"
              "            if tensor.split != 2 or tensor.most_shards else\n"
              "            np.split(x.reshape(len(x), -1), t, 1)[rank].reshape(tensor.local_shape(t)))"),
          on_ranks("rank_theorems.mlp_equals_whole", GROUPS)),
    Entry("the gate's activation on the wrong half", "computation", "model", "classic",
          "[gate, up] and [up, gate] have one shape, and the backward takes them in the other order.",
          Bug("mpi_impl.layers.gated_mlp", "dz = swiglu_backward(linear(dy, p.w_out.T), act_cache)",
              "dz = swiglu_backward(linear(dy, p.w_out.T), act_cache)[..., ::-1, :].copy()"),
          on_ranks("rank_theorems.mlp_equals_whole", GROUPS)),
    Entry("the square's slope without its 2", "scaling", "model", "classic",
          "The backward multiplies with relu(z), as if the slope of relu(z)^2 were relu(z).",
          Bug("mpi_impl.layers.squared_relu_mlp", " * rectified * 2", " * rectified"),
          on_ranks("rank_theorems.mlp_equals_whole", SQUARED)),
    Entry("the cache in the place of its square", "computation", "model", "classic",
          "What the forward kept goes into the second matrix's gradient, as in every other MLP; here it is the root of "
          "what was multiplied.",
          Bug("mpi_impl.layers.squared_relu_mlp", "sink(grads.w_out, rectified * rectified, dy)",
              "sink(grads.w_out, rectified, dy)"),
          on_ranks("rank_theorems.mlp_equals_whole", SQUARED)),
    Entry("copies of a head of keys drift apart", "missing communication", "TP", "classic",
          "With fewer heads of keys than ranks, each rank moves its copy by the gradient of its own queries.",
          Bug("mpi_impl.parallel.model_state", "shared_pieces(self.pieces).items()", "()"),
          TRAINED),
    Entry("copies summed over all ranks", "wrong group", "TP", "classic",
          "The gradient of a copied head is summed over the tensor-parallel group, with those of other heads.",
          Bug("mpi_impl.parallel.model_state", "self.topology.neighbours(copies)", "self.topology.tensor"),
          TRAINED),
    Entry("copies counted on every rank in the norm", "scaling", "TP", "after NVIDIA/Megatron-LM #7452",
          "A head of keys is marked as sharded, so every rank adds its copy to the norm, and clipping depends on t.",
          Bug("mpi_impl.parallel.model_state", "tensor_rank % piece.of.copies == 0]",
              "(tensor_rank == 0 if piece.of.tensor.split is None else True)]"),
          TRAINED),
    Entry("the gain of a norm of keys is not summed", "missing communication", "TP", "NVIDIA/Megatron-LM #7452",
          "The norm of queries and keys is on every rank like other norms, but each rank sees its own heads only: "
          "without sequence parallelism nobody sums its gradient.",
          Bug("reference.parallel.layout", "if piece.of.tensor.most_shards is not None and piece.of.copies > 1",
              "if (piece.of.tensor.most_shards or 1) > 1 and piece.of.copies > 1"),
          TRAINED),
    Entry("heads dealt out to groups in turn", "computation", "TP", "classic",
          "Head i takes the keys of group i modulo g, which is right on one rank only where the checkpoint has that "
          "order.",
          Bug("mpi_impl.layers.grouped_attention", "CoreInputs(q, k, v, c.causal",
              "CoreInputs(q, k[:, :, ::-1].copy(), v, c.causal"),
          on_ranks("rank_theorems.attention_equals_whole", replace(GROUPS, t=1))),
    Entry("the first head's dropout on every rank", "random numbers", "TP", "classic",
          "A rank counts its heads from 0, in groups of its own, so all ranks drop the same places.",
          Bug("mpi_impl.layers.grouped_attention", "first_head=region.rank * q.shape[2]", "first_head=0"),
          on_ranks("rank_theorems.attention_equals_whole", GROUPS, True, Recompute("selective"))),
    Entry("keys rotated before their norm", "computation", "model", "classic",
          "The norm of each head does not change lengths' ratios, so its place seems not to matter; but its gains do.",
          Bug("reference.layers.grouped_attention",
              "    k, k_norm = head_norm(k, p.k_norm, c.layernorm_epsilon)\n"
              "    if context.rotary is not None:\n"
              "        q, k = rotate(q, context.rotary), rotate(k, context.rotary)\n",
              "    if context.rotary is not None:\n"
              "        q, k = rotate(q, context.rotary), rotate(k, context.rotary)\n"
              "    k, k_norm = head_norm(k, p.k_norm, c.layernorm_epsilon)\n"),
          in_textbook("gradients_are_derivatives", replace(GROUPS, t=1))),
    Entry("the sum over copies, in the textbook", "missing communication", "TP", "classic",
          "The region completes replicated tensors alone, and a head of keys is sharded.",
          Bug("reference.comm.regions", "parts if tensor.most_shards is None else", "parts if True else"),
          in_textbook("attention_equals_whole", COPIES)),
]
