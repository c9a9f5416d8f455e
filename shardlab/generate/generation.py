"""The program that writes texts: prompts in, texts out, the first of a batch as it comes."""
import time
from functools import partial

from mpi_impl.comm.group import Group
from mpi_impl.data.tokenizer import Tokenizer, encode_whole
from mpi_impl.inference.decoding import generate
from mpi_impl.runtime.files import read_text
from reference.config import ModelConfig, check_model_fits
from reference.errors import UserError
from reference.parallel.stages import stages_of_ranks
from shardlab.generate.options import GenerationSettings, check_top_k
from shardlab.generate.sources import ModelSource, find, load_model
from shardlab.generate.stream import Stream
from shardlab.programs.program import Program


class Generation(Program):
    """One rank's part of the program."""

    def __init__(self, settings: GenerationSettings, ranks: Group):
        super().__init__(settings.args, ranks)
        self.settings = settings
        source, self.prompts, self.tokenizer = ranks.broadcast_object(self.prepare)
        self.model: ModelConfig = source.model
        topology = self.connect(settings.parallel)
        self.replica = load_model(source, topology, self.args.dtype, self.device.like)
        placed = ranks.hosts().describe(topology.tensor.size)
        self.introduction = "\n".join(filter(None, [source.describe() + self.tokenizer.note, self.device.description,
                                                    placed, self.about_length()]))

    def prepare(self) -> tuple[ModelSource, list[list[int]], Tokenizer]:
        """Return the model, the prompts as tokens, and the tokenizer. Called by rank 0.

        Raises UserError for whatever is wrong with what the options name, before anything is loaded.
        """
        source = find(self.args)
        model = source.model
        check_model_fits(model, self.settings.parallel)
        stages_of_ranks(model, self.settings.parallel)      # raises if there are more stages than layers
        check_top_k(self.settings.sampling.top_k, model)
        tokenizer = source.tokenizer(self.args)
        return source, [encode_prompt(prompt, tokenizer, model) for prompt in read_prompts(self.args)], tokenizer

    def about_length(self) -> str:
        """Return a note if a text may become longer than the model can see."""
        n, longest = self.model.max_position_embeddings, max(map(len, self.prompts)) + self.args.tokens_to_generate
        return "" if longest <= n else (
            f"note: a text may get {longest:,} tokens long, and the model has {n:,} positions: whenever they are used "
            f"up, it goes on from the last {max(1, n // 2):,} tokens")

    def work(self) -> None:
        self.say(f"{self.introduction}\n")
        began, tokens, b = time.perf_counter(), 0, self.args.micro_batch_size
        prompts = [prompt for prompt in self.prompts for _ in range(self.args.num_samples)]
        for first in range(0, len(prompts), b):
            tokens += self.write(prompts[first:first + b], first)
        seconds = time.perf_counter() - began
        self.say(f"{tokens:,} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s")

    def write(self, prompts: list[list[int]], first_text: int) -> int:
        """Write a batch of texts, each from its prompt to its end: the first one as it comes, the others after it.

        Return how many tokens they have, their ends included.
        """
        later: list[list[str]] = [[] for _ in prompts[1:]]
        write = partial(print, end="", flush=True) if self.first else len
        ends = [] if self.args.ignore_eod else self.tokenizer.ends
        streams = [Stream(self.tokenizer, to, ends, self.args.stop or ()) for to in (write, *(x.append for x in later))]
        for stream, prompt in zip(streams, prompts):
            stream.begin(prompt[len(self.tokenizer.prefix):])       # which nobody wrote
        count = 0
        for found in generate(self.replica, [prompt or [self.tokenizer.eod] for prompt in prompts],
                              self.args.tokens_to_generate, self.settings.sampling, first_text):
            for stream, token in zip(streams, found):
                if token is not None and not stream.ended:
                    stream.add(token)
                    count += 1
            if all(stream.ended for stream in streams):
                break
        for stream in streams:
            stream.end()
        self.say("\n" + "".join(f"\n{''.join(text)}\n" for text in later))
        return count


def read_prompts(args) -> list[str]:
    """Return the prompts that the options name. Raises UserError for a file that cannot be read, or is empty."""
    if args.prompts_file is None:
        return args.prompt or [""]
    text = read_text(args.prompts_file).replace("\r\n", "\n")
    if not text:
        raise UserError(f"--prompts-file {args.prompts_file} is empty. Write a prompt into each line.")
    return text.removesuffix("\n").split("\n")


def encode_prompt(prompt: str, tokenizer: Tokenizer, model: ModelConfig) -> list[int]:
    """Return a prompt's tokens. Raises UserError if it is not text, or longer than the model can see."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:      # bytes of the command line that are not
        raise UserError(f"--prompt {prompt!r} is not UTF-8 text.") from error
    tokens, n = encode_whole(tokenizer, prompt), model.max_position_embeddings
    if len(tokens) > n:
        raise UserError(f"The prompt {prompt[:40]!r}... has {len(tokens):,} tokens, but the model has {n:,} positions, "
                        "which leaves no room for a continuation. Give a shorter one.")
    return tokens
