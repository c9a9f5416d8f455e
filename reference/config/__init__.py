"""Sizes of a model and of its parallelism, with the rules they must keep and an error sentence for each broken rule.

Letters of the papers: h hidden size, L layers, a attention heads, g heads of keys and values, f width of the MLP, s
sequence length, V vocabulary size; t tensor-parallel, p pipeline-parallel, d data-parallel ranks; b micro-batch size, B
global batch size.
"""
from reference.config.checks import (LARGEST, option, require_divides, require_not_negative, require_not_too_large,
                                     require_one_of, require_positive, round_up)
from reference.config.experts_config import ExpertsConfig
from reference.config.fits import check_model_fits, check_sequence_fits, number_of_microbatches
from reference.config.model_config import ACTIVATIONS, ARCHITECTURES, NORMALIZATIONS, POSITION_EMBEDDINGS, ModelConfig
from reference.config.optimizer_config import DECAY_STYLES, MUON_SCALE_MODES, MUON_TP_MODES, OPTIMIZERS, OptimizerConfig
from reference.config.parallel_config import CP_COMM_TYPES, ParallelConfig, check_zero_stage, data_parallel_size
from reference.config.recompute import RECOMPUTE, Recompute
from reference.config.rope_scaling import RopeScaling

__all__ = ["ACTIVATIONS", "ARCHITECTURES", "CP_COMM_TYPES", "DECAY_STYLES", "LARGEST", "MUON_SCALE_MODES",
           "MUON_TP_MODES", "NORMALIZATIONS", "OPTIMIZERS", "POSITION_EMBEDDINGS", "RECOMPUTE", "ExpertsConfig",
           "ModelConfig", "OptimizerConfig", "ParallelConfig", "Recompute", "RopeScaling", "check_model_fits",
           "check_sequence_fits", "check_zero_stage", "data_parallel_size", "number_of_microbatches", "option",
           "require_divides", "require_not_negative", "require_not_too_large", "require_one_of", "require_positive",
           "round_up"]
