"""Decisions in words with numbers. Takes only data that travels, so the client can use it too."""

from __future__ import annotations

from collections.abc import Mapping

from controller.scheduler.types import Decision, RankedJob, Start, WaitNote, WaitReason
from protos.messages import JobSpec

_GIB = 1024**3


def describe(note: WaitNote, spec: JobSpec) -> str:
    """One sentence that says why a job waits, without a full stop.

    Points in time stay numbers in the note (`until_s`); only who prints them knows the clock.
    """
    text = _why(note, spec)
    if not note.reserved_nodes:
        return text
    after = f" when job {note.reserved_after_job} ends" if note.reserved_after_job else ""
    return f"{text}; reserved {', '.join(note.reserved_nodes)}{after}"


def _why(note: WaitNote, spec: JobSpec) -> str:
    match note.reason:
        case WaitReason.PRIORITY:
            return (
                f"there was room for {_need(note, spec)}, but {_jobs(note.ahead)} before it in the "
                "order took it"
            )
        case WaitReason.RESOURCES:
            return _shortage(note, spec)
        case WaitReason.NODE_DRAINED | WaitReason.NODE_UNHEALTHY | WaitReason.NODE_DOWN:
            return (
                f"needs {_need(note, spec)}; there would be room on nodes that take no work now: "
                f"{note.detail}"
            )
        case WaitReason.NEVER_FITS:
            return note.detail
        case WaitReason.BACKOFF:
            if note.detail:
                return f"its launch failed lately on {note.detail}; no other node has room"
            return "its last launch failed; it is tried again after a pause"
        case WaitReason.NOT_CONSIDERED:
            return f"{_jobs(note.ahead)} are before it; one cycle looks at fewer than that"
        case WaitReason.QUOTA:
            return f"{note.detail}, and jobs that run use that up"
        case WaitReason.RESERVED:
            held_for = f"held for {note.detail}" if note.detail else "kept by the policy's order"
            return f"there is room for {_need(note, spec)}, but it is {held_for}"
        case WaitReason.HELD:
            return "held; release it to let it run"


def explain_wait(job_id: int, spec: JobSpec, decision: Decision) -> tuple[str, ...]:
    """Sentences on why a job was not started by a decision; empty if the decision has no note."""
    note = decision.waits.get(job_id)
    if note is None:
        return ()
    lines = [describe(note, spec)]
    entry = next((entry for entry in decision.ranking if entry.job.job_id == job_id), None)
    if entry is not None:
        lines.append(f"{describe_rank(entry, decision.policy)}; {_jobs(note.ahead)} before it")
    if note.reason is WaitReason.RESOURCES and note.gpus_needed and not note.detail:
        free = f"{_count(note.free_gpus, _type_words(spec))} free in the whole cluster"
        lines.append(f"{free}{_sick(note.sick_gpus)}")
    lines += _how_decided(decision)
    return tuple(lines)


def explain_start(start: Start, spec: JobSpec, decision: Decision) -> tuple[str, ...]:
    """Sentences on why a job went where it went."""
    lines = [f"started on {_places(start)}"]
    entry = next((entry for entry in decision.ranking if entry.job.job_id == start.job_id), None)
    if entry is not None:
        place = decision.ranking.index(entry)
        lines.append(f"{describe_rank(entry, decision.policy)}; {_jobs(place)} before it")
    if spec.gpus:
        lines.append(_why_there(start, spec))
    lines += _how_decided(decision)
    return tuple(lines)


def describe_rank(entry: RankedJob, policy: str) -> str:
    """The priority of a job with the terms that it is made of."""
    if policy == "multifactor":
        return f"priority {entry.score:,.1f} = {_sum(entry.terms)}"
    figures = ", ".join(f"{_words(name)} {value:,g}" for name, value in entry.terms.items())
    return f"ordered by {policy}: {figures}"


def _shortage(note: WaitNote, spec: JobSpec) -> str:
    needs = f"needs {_need(note, spec)}"
    if not note.best_node:
        return (
            f"{needs}; no node that takes work has such GPUs"
            if spec.gpus
            else f"{needs}; no node takes work"
        )
    match note.short_of:
        case "gpus":
            has = f"{note.best_node_free_gpus} free{_sick(note.best_node_sick_gpus)}"
        case "cpus":
            needs = f"needs {_count(spec.cpus, 'CPU')} beside {_need(note, spec)}"
            if not spec.gpus:
                needs = f"needs {_need(note, spec)}"
            has = f"{_count(note.best_node_free_cpus, 'CPU')} free"
        case "memory":
            needs = f"needs {_gib(spec.memory_bytes)} of memory beside {_need(note, spec)}"
            has = f"{_gib(note.best_node_free_memory_bytes)} free"
        case _ if not note.nodes_needed:
            return f"{needs}; {_count(note.free_gpus, 'GPU')} of such types are free"
        case _:
            return f"{needs}; only {_count(note.nodes_with_room, 'node')} of one type has room"
    return f"{needs}; the best node ({note.best_node}) has {has}"


def _sick(gpus: int) -> str:
    return f", {gpus:,} out of service" if gpus else ""


def _need(note: WaitNote, spec: JobSpec) -> str:
    """What the job asks for, e.g. `4 P100 on each of 2 nodes`."""
    what = _count(note.gpus_needed, _type_words(spec)) if spec.gpus else _count(spec.cpus, "CPU")
    if not note.nodes_needed:
        return f"{what} on as few nodes as possible"
    where = "one node" if note.nodes_needed == 1 else f"each of {note.nodes_needed} nodes"
    return f"{what} on {where}"


def _type_words(spec: JobSpec) -> str:
    return " or ".join(spec.gpu_types) if spec.gpu_types else "GPU"


def _count(count: int, noun: str) -> str:
    plural = "s" if noun in {"GPU", "CPU", "node", "job"} and count != 1 else ""
    return f"{count:,} {noun}{plural}"


def _jobs(count: int) -> str:
    return _count(count, "job")


def _places(start: Start) -> str:
    return ", ".join(
        f"{rank.node} (GPU {', '.join(map(str, rank.gpu_indices))})"
        if rank.gpu_indices
        else rank.node
        for rank in start.ranks
    )


def _why_there(start: Start, spec: JobSpec) -> str:
    left = round(start.terms.get("gpus_left_over", 0.0))
    change = round(start.terms.get("partly_used_nodes", 0.0))
    preference = round(start.terms.get("type_preference", 0.0))
    parts = [f"leaves {_count(left, 'GPU')} of that type free there"]
    if change:
        parts.append(
            f"{'adds' if change > 0 else 'removes'} {_count(abs(change), 'node')} in part use"
        )
    if len(spec.gpu_types) > 1:
        parts.append(f"its GPU type number {preference + 1} of {len(spec.gpu_types)}")
    return "; ".join(parts)


def _how_decided(decision: Decision) -> list[str]:
    lines = []
    if decision.cut_short:
        lines.append(f"the {decision.allocator} allocator was cut short by its limit")
    if decision.fallback:
        lines.append(f"placed by greedy: {decision.fallback}")
    return lines


def _sum(terms: Mapping[str, float]) -> str:
    return " + ".join(f"{_words(name)} {value:,.1f}" for name, value in terms.items())


def _words(name: str) -> str:
    return name.removesuffix("_s").replace("_", " ")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:,.1f} GiB"
