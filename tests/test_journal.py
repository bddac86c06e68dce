"""The journal: what a crash at any byte leaves, what is damage and what is a torn end, and what is kept how long."""

import asyncio
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from flashflow.config.sections import JournalSection
from flashflow.errors import ConfigError, JournalError
from flashflow.journal import open_journal, replay
from flashflow.journal.framing import HEADER_BYTES, AppendFile, frame, read_records, unframe
from flashflow.journal.payloads import Payloads, decode_trajectory, encode_trajectory
from flashflow.ledger import Ledger, Rules, State
from flashflow.ledger import events as e
from flashflow.records import SampleId, Trajectory

RULES = Rules(group_size=2, batch_groups=1, alpha=1.0)


def trajectory(sample, num_tokens=5, version=0):
    mask = np.arange(num_tokens) >= 2
    return Trajectory(
        sample=sample,
        tokens=np.arange(num_tokens, dtype=np.int32) + 100 * sample.group,
        mask=mask.astype(np.uint8),
        logprobs=np.where(mask, -0.5 - np.arange(num_tokens), 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        num_turns=1,
        outcome="completed",
        reward=0.25,
        reward_components={"exact": 0.25},
        finish_reason="stop",
        seconds=1.5,
    )


def open_in(folder, rules=RULES, seed=7, segment_bytes=1 << 20):
    return open_journal(folder, JournalSection(segment_bytes=segment_bytes), rules, run="test", seed=seed)


class Writer:
    """Writes a short run, remembering the ledger's state as it was after every record."""

    def __init__(self, folder, **options):
        self.folder = folder
        self.journal, self.ledger = open_in(folder, **options)
        self.events = [e.Opened(e.FORMAT, self.ledger.opening, "test", 7, 2, 1, 1.0)]

    def record(self, event):
        self.ledger.apply(event)
        self.journal.append(event)
        self.events.append(event)

    def lease(self):
        if not self.ledger.queue:
            self.record(self.ledger.admit())
        leased = self.ledger.lease()
        self.record(leased)
        return leased

    def commit(self, leased, **options):
        written = trajectory(self.ledger.groups[leased.group].sample(leased.member), **options)
        place = self.journal.payloads.append(written)
        self.record(e.Committed(leased.group, leased.member, leased.epoch, 0, 5, 3, 0.25, "completed", place))
        return place

    def short_run(self):
        self.record(e.Served(0))
        first, second = self.lease(), self.lease()
        self.commit(second)
        self.record(e.LeaseExpired(first.group, first.member))
        self.commit(self.lease())
        self.record(self.ledger.take(1, [0], rng_key=2**64 - 1))
        self.commit(self.lease())
        self.lease()
        return self


def transitions(folder):
    return sorted(folder.glob("transitions-*.log"))


def without_leases(ledger, opening):
    """What a reopened journal gives back of `ledger`."""
    ledger.apply(e.Opened(e.FORMAT, opening, "test", 7, 2, 1, 1.0))
    return ledger


def copy_of(folder, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    return target


def ledger_after(events):
    ledger = Ledger(RULES)
    for event in events:
        ledger.apply(event)
    return ledger


def test_a_record_comes_back_as_it_was():
    assert unframe(frame(b"abc"), 0) == b"abc"
    assert len(frame(b"abc")) == HEADER_BYTES + 3


@pytest.mark.parametrize("place", range(HEADER_BYTES + 3))
def test_one_flipped_bit_anywhere_is_seen(place):
    damaged = bytearray(frame(b"abc"))
    damaged[place] ^= 1
    assert unframe(bytes(damaged), 0) is None


def test_zeros_are_no_record():
    assert unframe(bytes(64), 0) is None


def test_a_trajectory_comes_back_bit_for_bit_and_writable():
    before = trajectory(SampleId(3, 1, 2))
    after = decode_trajectory(encode_trajectory(before))
    for name in ("tokens", "mask", "logprobs", "versions"):
        assert getattr(after, name).dtype == getattr(before, name).dtype
        assert getattr(after, name).tobytes() == getattr(before, name).tobytes()
        assert getattr(after, name).flags.writeable
    assert (after.sample, after.reward, after.outcome) == (before.sample, 0.25, "completed")
    assert after.reward_components == {"exact": 0.25}


def test_a_file_torn_at_any_byte_gives_the_records_written_whole(tmp_path):
    path = transitions(Writer(tmp_path).short_run().folder)[0]
    whole, records = path.read_bytes(), list(read_records(path, may_be_torn=False))
    for size in range(len(whole)):
        torn = tmp_path / "torn"
        torn.write_bytes(whole[:size])
        assert list(read_records(torn, may_be_torn=True)) == [record for record in records if record[0] <= size]


@pytest.mark.parametrize("torn_bytes", [0, 1, HEADER_BYTES + 1])
def test_a_crash_after_or_within_any_record_gives_back_what_was_written_whole(tmp_path, torn_bytes):
    writer = Writer(tmp_path / "run").short_run()
    path = transitions(writer.folder)[0]
    whole = path.read_bytes()
    ends = [0, *(end for end, _ in read_records(path, may_be_torn=False))]
    assert len(ends) == 1 + len(writer.events)
    for num_whole, end in enumerate(ends):
        folder = copy_of(writer.folder, tmp_path / "crashed")
        transitions(folder)[0].write_bytes(whole[: end + torn_bytes])
        journal, ledger = open_in(folder)
        journal.close()
        assert ledger == without_leases(ledger_after(writer.events[:num_whole]), opening=1)
        assert transitions(folder)[0].stat().st_size == end


def test_a_journal_reopened_again_and_again_goes_on_where_it_was(tmp_path):
    Writer(tmp_path).short_run().journal.close()
    for opening in range(1, 4):
        journal, ledger = open_in(tmp_path)
        assert ledger.opening == opening
        assert ledger.counts()[State.CONSUMED] == 2
        assert ledger.counts()[State.COMMITTED] == ledger.counts()[State.ADMITTED] == 1
        assert ledger.next_cursor == 2
        assert ledger.manifests[1].rng_key == 2**64 - 1
        journal.close()
    offline = Ledger(RULES)
    replay(tmp_path, offline)
    assert offline == ledger


@pytest.mark.parametrize("place", [0, 3, 4, 8, 20])
def test_a_damaged_record_in_the_middle_is_named_and_refused(tmp_path, place):
    Writer(tmp_path).short_run().journal.close()
    path = transitions(tmp_path)[0]
    data = bytearray(path.read_bytes())
    third = [end for end, _ in read_records(path, may_be_torn=False)][1]
    data[third + place] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(JournalError, match=rf"{path.name}: the record at byte {third} is damaged"):
        open_in(tmp_path)
    assert path.read_bytes() == data


def test_a_torn_end_of_any_file_but_the_newest_is_damage(tmp_path):
    Writer(tmp_path).short_run().journal.close()
    open_in(tmp_path)[0].close()
    path = transitions(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalError, match="is damaged"):
        open_in(tmp_path)


def test_a_tail_of_zeros_is_a_torn_end(tmp_path):
    Writer(tmp_path).short_run().journal.close()
    path = transitions(tmp_path)[0]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes(4096))
    open_in(tmp_path)[0].close()
    assert path.stat().st_size == size


def test_events_that_contradict_each_other_are_refused(tmp_path):
    journal, _ = open_in(tmp_path)
    journal.append(e.LeaseExpired(0, 0))
    journal.append(e.Served(0))
    journal.close()
    with pytest.raises(JournalError, match="cannot have happened"):
        open_in(tmp_path)


@pytest.mark.parametrize(
    ("field", "changes", "seed"),
    [
        ("rollout.group_size: 3, but", {"group_size": 3}, 7),
        ("batch.groups: 4, but", {"batch_groups": 4}, 7),
        ("rollout.alpha: 0.5, but", {"alpha": 0.5}, 7),
        ("run.seed: 8, but", {}, 8),
    ],
)
def test_another_config_is_refused_by_the_name_of_its_field(tmp_path, field, changes, seed):
    Writer(tmp_path).journal.close()
    rules = Rules(**{"group_size": 2, "batch_groups": 1, "alpha": 1.0, **changes})
    with pytest.raises(ConfigError, match=field):
        open_in(tmp_path, rules=rules, seed=seed)
    open_in(tmp_path)[0].close()


def test_two_processes_never_have_one_journal(tmp_path):
    journal, _ = open_in(tmp_path)
    with pytest.raises(JournalError, match="another process has this journal"):
        open_in(tmp_path)
    journal.close()
    open_in(tmp_path)[0].close()


def test_payloads_are_read_from_the_segment_they_lie_in(tmp_path):
    payloads = Payloads(tmp_path, segment_bytes=500)
    samples = [SampleId(group, 0) for group in range(12)]
    places = [payloads.append(trajectory(sample)) for sample in samples]
    assert places[0].segment == 0
    assert places[-1].segment > 1
    assert [payloads.read(place).sample for place in places] == samples


def test_a_payload_is_durable_once_synced_also_in_a_full_segment(tmp_path):
    payloads = Payloads(tmp_path, segment_bytes=1)
    first, second = payloads.append(trajectory(SampleId(0, 0))), payloads.append(trajectory(SampleId(1, 0)))
    assert not payloads.durable(first)
    assert not payloads.durable(second)
    payloads.sync()
    third = payloads.append(trajectory(SampleId(2, 0)))
    assert payloads.durable(first)
    assert payloads.dirty
    assert not payloads.durable(third)
    payloads.sync()
    assert payloads.durable(second)
    assert payloads.durable(third)


def test_a_damaged_payload_is_named_and_refused_when_read(tmp_path):
    payloads = Payloads(tmp_path, segment_bytes=1000)
    place = payloads.append(trajectory(SampleId(0, 0)))
    path = tmp_path / "payload-000000.log"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"payload-000000.log: no sound payload at byte 0"):
        payloads.read(place)


def test_segments_nothing_needs_are_deleted(tmp_path):
    payloads = Payloads(tmp_path, segment_bytes=1)
    places = [payloads.append(trajectory(SampleId(group, 0))) for group in range(4)]
    payloads.sync()
    payloads.keep_only({places[1].segment})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["payload-000001.log", "payload-000003.log"]
    assert payloads.read(places[1]).sample == SampleId(1, 0)


def test_a_commit_whose_payload_the_dying_host_lost_is_given_out_again(tmp_path):
    writer = Writer(tmp_path)
    writer.record(e.Served(0))
    writer.commit(writer.lease())
    lost = writer.commit(writer.lease())
    writer.journal.close()
    segment = tmp_path / "payload-000000.log"
    segment.write_bytes(segment.read_bytes()[: lost.offset + 4])
    for _ in range(2):
        journal, ledger = open_in(tmp_path)
        assert [member.state for member in ledger.groups[0].members] == [State.COMMITTED, State.ADMITTED]
        journal.close()


def test_a_lost_payload_before_a_sound_one_is_damage(tmp_path):
    writer = Writer(tmp_path)
    writer.record(e.Served(0))
    damaged = writer.commit(writer.lease())
    writer.commit(writer.lease())
    writer.journal.close()
    segment = tmp_path / "payload-000000.log"
    data = bytearray(segment.read_bytes())
    data[damaged.offset + 20] ^= 1
    segment.write_bytes(data)
    with pytest.raises(JournalError, match="no sound payload at byte 0"):
        open_in(tmp_path)


def test_a_failed_write_leaves_no_part_of_a_record(tmp_path):
    file = AppendFile(tmp_path / "file")
    file.append(b"whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.append(b"x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    file.append(b"after")
    assert [body for _, body in read_records(tmp_path / "file", may_be_torn=False)] == [b"whole", b"after"]


KILLED = """
import os, signal, sys
from pathlib import Path
from flashflow.config.sections import JournalSection
from flashflow.journal import open_journal
from flashflow.ledger import Rules
rules = Rules(group_size=2, batch_groups=1, alpha=1.0)
journal, ledger = open_journal(Path(sys.argv[1]), JournalSection(), rules, run="test", seed=7)
for _ in range(50):
    event = ledger.admit()
    ledger.apply(event)
    journal.append(event)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_append_returned_from_survives_kill_9(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    journal, ledger = open_in(tmp_path)
    assert (ledger.next_group, ledger.next_cursor) == (50, 50)
    journal.close()


def test_sync_covers_everything_appended_before_it(tmp_path):
    writer = Writer(tmp_path)
    writer.record(e.Served(0))
    place = writer.commit(writer.lease())
    assert writer.journal.dirty
    asyncio.run(writer.journal.sync())
    assert not writer.journal.dirty
    assert writer.journal.payloads.durable(place)
    writer.journal.close()
