"""The reasons for the best plan: the three rules of Narayanan et al. 2021 (2104.04473, section 3), tested on it.

1.  Tensor parallelism up to the size of a server, then pipelines across servers (section 3.2).
2.  Only the model parallelism t x p that the memory needs, and data parallelism for the rest (section 3.3).
3.  The microbatch size that makes a step fastest, which depends on the model and the pipeline (section 3.4).

A rule that holds is reported with the cost of its neighbours; one that is beaten, with the margin and the reason.
"""
import math
from collections.abc import Callable

from reference.costs.step_time import StepTime
from shardlab.plan.candidates import PlanSearch, Timed, in_words, shape_of

AS_FAST = 0.006     # a smaller relative difference is none, and would not show in percent

# The parts of a step's time, for a sentence.
NAMES = {"products": "matrix products", "kernels": "everything but matrix products",
         "messages": "messages of tensor parallelism",
         "context": "messages of context parallelism", "experts": "messages between experts",
         "idle": "the pipeline's idle time",
         "replicas": "messages of the replicas, and waiting for the slowest", "optimizer": "the optimizer"}


def reasons(job: PlanSearch) -> list[str]:
    """Return a line of sentences for each rule, and one for later methods, as far as the model has a use for them."""
    found = [tensor_rule(job), pipeline_rule(job), microbatch_rule(job), saving(job)]
    found += [context_reason(job)] if any(one.shape[3] > 1 for one in job.fitting) else []
    return found + ([expert_reason(job)] if job.model.experts else [])


# ---- 1 --------------------------------------------------------------------------------------------------------------


def tensor_rule(job: PlanSearch) -> str:
    server, (t, p, *_) = job.hardware.server, job.best[0].shape
    rule = f"Rule 1, t up to the {min(server, job.n)} devices of a server, and only then p:"
    widest = max((one.shape[0] for one in job.fitting if one.shape[0] <= server), default=0)
    wider = alternative(job, "With a t beyond that", lambda one: one.shape[0] > server)
    if t > server:
        return join(f"{rule} beaten.", alternative(job, "With less", lambda one: one.shape[0] <= server))
    if p == 1:
        return join(f"{rule} holds, for no pipeline is needed, and t = {t} is enough.",
                    alternative(job, "With a larger t", lambda one: t < one.shape[0] <= server), wider)
    if t == widest:
        verdict = "holds." if t == server else f"holds, for t = {t} is the largest up to it that is possible, and fits."
        return join(f"{rule} {verdict}", alternative(
            job, "With a smaller t and a pipeline", lambda one: one.shape[0] < t and one.shape[1] > 1), wider)
    return join(f"{rule} beaten.", alternative(job, f"With t = {widest}", lambda one: one.shape[0] == widest), wider)


# ---- 2 --------------------------------------------------------------------------------------------------------------


def pipeline_rule(job: PlanSearch) -> str:
    rule, mine = "Rule 2, t x p as small as the memory allows, and d for the rest:", model_parallelism(job.best[0])
    if smaller := alternative(job, "With that", lambda one: model_parallelism(one) < mine):
        return join(f"{rule} beaten, for a smaller one fits, too.", smaller)
    possible = any(math.prod(shape_of(plan)[:2]) < mine for plan in job.plans)
    why = (f"with t x p below {mine} nothing fits" if possible else "nothing is smaller" if mine == 1 else
           f"t x p below {mine} is not possible")
    return join(f"{rule} holds, for {why}.",
                alternative(job, "With a larger one", lambda one: model_parallelism(one) > mine))


def model_parallelism(one: Timed) -> int:
    return math.prod(one.shape[:2])


# ---- 3 --------------------------------------------------------------------------------------------------------------


def microbatch_rule(job: PlanSearch) -> str:
    """Compare all b of the best plan's shape, each with its best other choices."""
    best = job.best[0]
    sizes = sorted({plan.b for plan in job.plans if shape_of(plan) == best.shape})
    rule = "Rule 3, the b that makes a step fastest:"
    if sizes == [1]:
        return f"{rule} with d = {best.shape[2]} each replica has one sample a step, so b = 1."
    fitting: dict[int, Timed] = {}
    for one in job.fitting:
        if one.shape == best.shape and one.plan.b not in fitting:
            fitting[one.plan.b] = best if one.plan.b == best.plan.b else job.simulate(one)
    compared_sizes = ", ".join(f"{one.seconds:.3g} s with b = {b}" for b, one in sorted(fitting.items()))
    others = [one for b, one in fitting.items() if b != best.plan.b]
    too_large = [str(b) for b in sizes if b not in fitting]
    return join(f"{rule} {compared_sizes}.", f"b = {' or '.join(too_large)} does not fit." if too_large else "",
                compare("Of the others", min(others, key=lambda one: one.seconds, default=None), best))


# ---- later methods --------------------------------------------------------------------------------------------------


def saving(job: PlanSearch) -> str:
    """Compare with a plan without ZeRO, sequence parallelism and selective recompute, all newer than that paper."""
    what = "ZeRO, sequence parallelism and selective recompute"
    if is_plain(job.best[0]):
        return f"{what}, which that paper does without, gain nothing here."
    return (alternative(job, f"Without {what}, as in that paper,", is_plain)
            or f"Without {what} nothing would fit.")


def is_plain(one: Timed) -> bool:
    p = one.plan.parallel
    return p.zero_stage == 0 and not p.sequence_parallel and not p.recompute.selective


def context_reason(job: PlanSearch) -> str:
    """Compare with plans without context parallelism, or with it; and tell which messages blocks do not hide."""
    best, (t, _, _, c) = job.best[0], job.best[0].shape
    s = f"{job.model.max_position_embeddings:,}"
    if c == 1:
        return join(f"Context parallelism is not needed: a rank holds all {s} positions, c = 1.",
                    alternative(job, "With c above 1", lambda one: one.shape[3] > 1))
    shown = (f"a rank holds {best.plan.positions:,} of {s} positions, and "
             + (f"blocks of attention hide all but {best.time.context:.3g} s of the ring's messages."
                if best.plan.parallel.cp_comm_type == "p2p" else
                f"heads are exchanged for them in {best.time.context:.3g} s of a step, for c divides the "
                f"{job.model.groups // t} heads of keys that it has."))
    without = (alternative(job, "With c = 1", lambda one: one.shape[3] == 1) or "With c = 1 nothing fits.")
    other = "a2a" if best.plan.parallel.cp_comm_type == "p2p" else "p2p"
    return join(f"Context parallelism, c = {c}: {shown}", without, alternative(
        job, f"With {other}", lambda one: one.shape[3] > 1 and one.plan.parallel.cp_comm_type == other))


def expert_reason(job: PlanSearch) -> str:
    """Compare with experts that are not dealt out, or with fewer on a rank."""
    assert job.model.experts
    best, number = job.best[0], job.model.experts.num_experts
    e = best.plan.parallel.expert_model_parallel_size
    sent = f", which costs {best.time.experts:.3g} s of a step, if the routers choose evenly" if e > 1 else ""
    shown = f"Expert parallelism, e = {e}: each rank holds {number // e} of a layer's {number} experts{sent}."
    if e == 1:
        return join(shown, alternative(job, "With e above 1", lambda one: experts_dealt(one) > 1))
    return join(shown, alternative(job, "With all experts on each rank", lambda one: experts_dealt(one) == 1)
                or "With all experts on each rank nothing fits.")


def experts_dealt(one: Timed) -> int:
    return one.plan.parallel.expert_model_parallel_size


# ---- sentences ------------------------------------------------------------------------------------------------------


def alternative(job: PlanSearch, where: str, like: Callable[[Timed], bool]) -> str:
    """Compare the fastest plan that fits and meets a condition with the best one; "" if there is none."""
    found = next(filter(like, job.fitting), None)
    return compare(where, found and job.simulate(found), job.best[0])


def compare(where: str, other: Timed | None, best: Timed) -> str:
    """Tell how much longer another plan takes, and for what; "" if there is none."""
    if other is None:
        return ""
    longer = other.seconds / best.seconds - 1
    if longer < AS_FAST:
        return f"{where} the best plan ({in_words(other.plan)}) is as fast."
    return f"{where} the best plan ({in_words(other.plan)}) takes {longer:.0%} longer{cause(other.time, best.time)}."


def cause(other: StepTime, best: StepTime) -> str:
    """Return the part of a step that makes most of the difference."""
    more = {name: getattr(other, name) - getattr(best, name) for name in StepTime._fields}
    name = max(more, key=lambda one: more[one])
    return (f", mostly for {NAMES[name]}: {getattr(other, name):.3g} s of a step, where it is "
            f"{getattr(best, name):.3g}")


def join(*sentences: str) -> str:
    return " ".join(filter(None, sentences))
