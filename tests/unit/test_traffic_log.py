"""The traffic log without ranks: what it keeps and what it adds up."""

from cplayers.mesh import TrafficLog
from cplayers.mesh.traffic import KEPT_RECORDS, sent_bytes


def test_the_log_is_bounded_and_its_totals_are_exact():
    log = TrafficLog()
    for number in range(KEPT_RECORDS + 5):
        log.record("tp", "all_gather", number)
    assert len(log) == KEPT_RECORDS
    assert (log[0].bytes, log[-1].bytes) == (5, KEPT_RECORDS + 4)
    assert log.count() == KEPT_RECORDS + 5
    assert log.bytes("tp") == sum(range(KEPT_RECORDS + 5))
    assert log.bytes("dcp") == 0
    assert sent_bytes("all_reduce", 4, 3) == 6  # 2 * 2 / 3 * 4 = 5.3, rounded up
