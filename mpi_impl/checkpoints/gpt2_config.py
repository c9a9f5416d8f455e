from mpi_impl.checkpoints.huggingface_config import (adopt, check_expressible, check_vocabulary, model_options,  # noqa
                                                     read_config)
from mpi_impl.checkpoints.huggingface_tokenizer import MERGES, VOCABULARY  # noqa: F401
