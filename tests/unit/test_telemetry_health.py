"""What takes a card out of service and what is only shown."""

import pytest

from node_agent.health import (
    XID_TABLE,
    Symptoms,
    Verdict,
    XidMeaning,
    XidSeverity,
    is_critical_xid,
    judge,
    xid_text,
)


def test_nothing_wrong() -> None:
    assert judge(Symptoms()) == Verdict((), ())
    assert judge(
        Symptoms(
            mig_enabled=False,
            ecc_uncorrected=0,
            throttle_reasons=("gpu_idle", "sw_power_cap"),
            recovery_action=0,
            row_remap_pending=False,
            row_remap_failed=False,
            page_retirement_pending=False,
        )
    ) == Verdict((), ())


@pytest.mark.parametrize(
    ("symptoms", "reason"),
    [
        (Symptoms(lost="gpu missing"), "gpu missing"),
        (Symptoms(unreadable="Unknown Error"), "NVML cannot read this GPU: Unknown Error"),
        (Symptoms(reset_required=True), "GPU needs a reset (nvidia-smi -r)"),
        (Symptoms(unwatched="No"), "Xid events cannot be watched: No"),
        (Symptoms(mig_enabled=True), "MIG is enabled; not supported yet"),
        (Symptoms(ecc_uncorrected=3), "3 uncorrected ECC errors since the driver loaded"),
        (
            Symptoms(page_retirement_pending=True),
            "page retirement pending: reset the GPU (nvidia-smi -r)",
        ),
        (Symptoms(recovery_action=4), "GPU asks for recovery: drain and reset the GPU"),
        (Symptoms(recovery_action=8), "GPU asks for recovery: unknown action 8"),
        (Symptoms(xids=[79]), "Xid 79: GPU has fallen off the bus"),
    ],
)
def test_reasons(symptoms: Symptoms, reason: str) -> None:
    assert judge(symptoms) == Verdict((reason,), ())


@pytest.mark.parametrize(
    ("symptoms", "warning"),
    [
        (
            Symptoms(throttle_reasons=("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown")),
            "clocks are throttled: hw_slowdown, sw_thermal_slowdown",
        ),
        (Symptoms(read_errors={"power": "Unknown Error"}), "cannot read power: Unknown Error"),
        (
            Symptoms(xids=[13]),
            "Xid 13: graphics engine exception, usually an error of the program",
        ),
        (Symptoms(xids=[4711]), "Xid 4711"),
    ],
)
def test_warnings(symptoms: Symptoms, warning: str) -> None:
    assert judge(symptoms) == Verdict((), (warning,))


@pytest.mark.parametrize(
    ("xids", "is_critical"),
    [
        ((13, 31, 43, 45, 68, 69, 94, 109, 4711), False),
        ((48, 63, 64, 74, 79, 95, 119, 120, 154), True),
    ],
)
def test_the_xid_table(xids: tuple[int, ...], is_critical: bool) -> None:
    assert [is_critical_xid(xid) for xid in xids] == [is_critical] * len(xids)


def test_a_lost_card_keeps_its_xids_and_nothing_else() -> None:
    symptoms = Symptoms(lost="GPU is lost", ecc_uncorrected=1, xids=[79, 31])
    verdict = judge(symptoms)
    assert verdict.reasons == ("GPU is lost", "Xid 79: GPU has fallen off the bus")
    assert [warning.split(":")[0] for warning in verdict.warnings] == ["Xid 31"]


def test_a_site_can_bring_its_own_table() -> None:
    table = {**XID_TABLE, 13: XidMeaning(XidSeverity.CRITICAL, "we want to see this card")}
    assert judge(Symptoms(xids=[13]), table).reasons == ("Xid 13: we want to see this card",)
    assert xid_text(79, {}) == "Xid 79"
