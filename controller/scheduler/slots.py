"""Which GPUs of its node a share gets: those that are close to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from controller.scheduler.index import ClusterIndex
from controller.scheduler.ledger import Place
from controller.scheduler.types import GpuSlot, RankPlacement, Start


def make_starts(
    places: Mapping[int, Place], index: ClusterIndex, terms: Mapping[int, Mapping[str, float]]
) -> tuple[Start, ...]:
    """Gives each share its GPUs, in the order of `places`.

    Args:
        places: place by job id.
        index: the cluster before any of these starts.
        terms: why each job goes there, by job id.
    """
    free: dict[tuple[str, str], list[GpuSlot]] = {}
    starts = []
    for job_id, place in places.items():
        ranks = []
        for share in place:
            if not share.gpus:
                ranks.append(RankPlacement(share.node, (), ()))
                continue
            key = (share.node, share.gpu_type)
            if key not in free:
                free[key] = _free_slots(index.nodes[share.node].gpus, share.gpu_type)
            chosen = choose_slots(free[key], share.gpus)
            taken = {slot.uuid for slot in chosen}
            free[key] = [slot for slot in free[key] if slot.uuid not in taken]
            ranks.append(
                RankPlacement(
                    share.node,
                    tuple(slot.uuid for slot in chosen),
                    tuple(slot.index for slot in chosen),
                )
            )
        starts.append(Start(job_id, tuple(ranks), terms[job_id]))
    return tuple(starts)


def choose_slots(free: Sequence[GpuSlot], count: int) -> tuple[GpuSlot, ...]:
    """Picks `count` of the free GPUs of a node (in order of index) that are close together.

    Where NVML tells the topology (`GpuSlot.near`), the smallest group of neighbours that is
    large enough is used, at the closest level that has one; so larger groups stay whole. Groups
    that are all too small are used up one after the other, the largest first. Without topology,
    the same is done with runs of neighbouring indices, which usually share a switch.
    """
    return tuple(sorted(_pick(list(free), count, 0), key=lambda slot: slot.index))


def _free_slots(gpus: Iterable[GpuSlot], gpu_type: str) -> list[GpuSlot]:
    slots = [slot for slot in gpus if slot.gpu_type == gpu_type and slot.is_free]
    return sorted(slots, key=lambda slot: slot.index)


def _pick(free: list[GpuSlot], count: int, level: int) -> list[GpuSlot]:
    if count == len(free) or not count:
        return free[:count]
    is_told = all(len(slot.near) > level for slot in free)
    groups = _by_path(free, level) if is_told else _runs(free)
    fitting = [group for group in groups if len(group) >= count]
    if fitting:
        smallest = min(fitting, key=len)
        return _pick(smallest, count, level + 1) if is_told else smallest[:count]
    if not is_told:
        return free[:count]
    largest = max(groups, key=len)
    taken = {slot.uuid for slot in largest}
    rest = [slot for slot in free if slot.uuid not in taken]
    return largest + _pick(rest, count - len(largest), level)


def _by_path(free: Sequence[GpuSlot], level: int) -> list[list[GpuSlot]]:
    groups: dict[int, list[GpuSlot]] = {}
    for slot in free:
        groups.setdefault(slot.near[level], []).append(slot)
    return list(groups.values())


def _runs(free: Sequence[GpuSlot]) -> list[list[GpuSlot]]:
    runs: list[list[GpuSlot]] = []
    for slot in free:
        if runs and runs[-1][-1].index + 1 == slot.index:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs
