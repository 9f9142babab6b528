"""The one door to the rules: `apply(state, event)` -> changes, effects and records."""

from __future__ import annotations

from typing import assert_never

from controller.lifecycle import events, job_rules, node_rules, rank_rules
from controller.lifecycle.events import Event
from controller.lifecycle.state import Draft, Outcome, StateView


def apply(state: StateView, event: Event) -> Outcome:
    """What an event comes to. The state itself is not touched.

    Raises:
        IllegalTransition: the event cannot happen in this state (a bug of the caller).
        NotAllowed: a person asked for what the state rules out.
    """
    draft = Draft(state)
    _dispatch(draft, event)
    return draft.outcome()


def _dispatch(draft: Draft, event: Event) -> None:  # noqa: C901 - one arm per event
    match event:
        case events.JobSubmitted():
            job_rules.job_submitted(draft, event)
        case events.JobPlaced():
            job_rules.job_placed(draft, event)
        case events.CancelRequested():
            job_rules.cancel_requested(draft, event)
        case events.HoldRequested():
            job_rules.hold_requested(draft, event)
        case events.ReleaseRequested():
            job_rules.release_requested(draft, event)
        case events.RequeueRequested():
            job_rules.requeue_requested(draft, event)
        case events.StartDeadlinePassed():
            job_rules.start_deadline_passed(draft, event)
        case events.UsageMeasured():
            job_rules.usage_measured(draft, event)
        case events.RankReported():
            rank_rules.rank_reported(draft, event)
        case events.AgentConnected():
            node_rules.agent_connected(draft, event)
        case events.NodeLost():
            node_rules.node_lost(draft, event)
        case events.NodeFactsChanged():
            node_rules.node_facts_changed(draft, event)
        case events.NodeHealthReported():
            node_rules.node_health_reported(draft, event)
        case events.NodeDrained():
            node_rules.node_drained(draft, event)
        case events.NodeResumed():
            node_rules.node_resumed(draft, event)
        case _:
            assert_never(event)
