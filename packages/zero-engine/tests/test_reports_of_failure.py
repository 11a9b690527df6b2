"""When a job goes wrong, each rank says where it was, and one command says which one differs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from configparser import RawConfigParser
from pathlib import Path
from typing import Final
from unittest import mock

import pytest
import torch.distributed as dist
from zero_engine import failure

pytestmark = [pytest.mark.slow, pytest.mark.drawn(2)]

STARTED: Final = "2021-01-01T00:00:00.000+00:00"
UNITS: Final = ["0", "1", "2", "3"]
SCRIPT: Final = f"""
import faulthandler, os, signal, sys, time
import torch, zero_comm, zero_engine

for rank in "01":  # forks, so that two ranks import once
    if not os.fork():
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        break
else:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.wait(), os.wait(), sys.exit()
if sys.argv[1] == "handles":
    signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"mine\\n"))
if sys.argv[1] == "handles-in-c":
    faulthandler.register(signal.SIGUSR1)
group = zero_comm.init()
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in {UNITS}))
optimizer = torch.optim.AdamW(model.parameters())
zero_engine.shard(model, optimizer, zero_engine.ZeroConfig(3, units={UNITS}, window=3))
for step in range(3):
    if step == 2:
        os.write(1, b"ready\\n")  # at once: ranks share the pipe
    if step == 2 and group.rank == 1:
        if sys.argv[1] == "raises":
            zero_engine.full_param(torch.ones(1))
        if sys.argv[1] == "raises-other":
            raise KeyError("of the user's")
        if sys.argv[1] in ("ends", "sums"):
            break
        if sys.argv[1] == "killed":
            time.sleep(1)  # until the other rank is in this step, too
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] not in ("repeats", "sums-last"):
            time.sleep(100)
    if step == 1 and group.rank == 1 and sys.argv[1] == "repeats":
        model(torch.ones(2, 64)).square().mean().backward()  # alone
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(2, 64)).square().mean().backward()  # together
    optimizer.step()
    optimizer.zero_grad()
if sys.argv[1] == "sums" or sys.argv[1] == "sums-last" and group.rank == 1:
    torch.distributed.all_reduce(torch.ones(1))
if sys.argv[1] == "repeats":
    zero_engine.full_param(model[0].weight)
"""
Job = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Starts two ranks, a process group, whose reports go to a folder."""
    started: list[subprocess.Popen[str]] = []

    def start(way: str, **environment: str) -> subprocess.Popen[str]:
        (script := tmp_path / "train.py").write_text(SCRIPT)
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
        where |= {"GLOO_SOCKET_IFNAME": "lo", "ZERO_REPORT": str(tmp_path / "reports")}
        del store  # its port is free
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command, env = [sys.executable, str(script), way], os.environ | where | environment
        started.append(subprocess.Popen(command, env=env, start_new_session=True, **pipes))
        return started[0]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _reports(tmp_path: Path) -> dict[int, RawConfigParser]:
    found = {rank: RawConfigParser() for rank in range(2)}
    paths = {rank: tmp_path / "reports" / f"zero-report-rank{rank}.txt" for rank in found}
    return {rank: parser for rank, parser in found.items() if parser.read(paths[rank])}


@pytest.mark.parametrize(
    ("way", "error", "says"),
    [
        ("raises", "StateError", "look at rank 1 first: its error"),
        ("killed", "", "look at rank 1, of which there is no report: ended or killed?"),
        ("raises-other", "", "rank 1: no report"),
        ("ends", "", "If it has ended, rank 0 at "),
    ],
)
def test_an_error_of_ours_leaves_a_report_on_every_rank_that_sees_one(
    tmp_path: Path, job: Job, zero, capsys, *, way: str, error: str, says: str
) -> None:
    """Of the user's own errors there is none; who waits for that rank has one of ours."""
    said = job(way).communicate(timeout=100)[0]

    reports = _reports(tmp_path)
    kinds = [report["report"]["why"].split(":")[0] for report in reports.values()]
    assert kinds[0] in {"CommError", "DivergenceError"}
    assert kinds[1:] == [error] * bool(error)
    for report in reports.values():
        assert "train.py" in report["report"]["why"]  # the traceback
        assert report["schedule"]["updates"] == "2"
        assert int(report["memory"]["params_bytes"]) == len(UNITS) * 65 * 64 * 4 // 2
    path = tmp_path / "reports" / "zero-report-rank0.txt"
    assert f"\nreport: {path}; run: zero report {path.parent}\n" in said  # after the traceback
    text = path.read_text()
    path.write_text(re.sub("\npython = .*", "\npython = 2.7", text))
    assert zero("report", path.parent) == 0
    said = capsys.readouterr().out
    assert says in said
    assert ("versions: python = 2.7 on rank 0; " in said) is bool(error)
    path.write_text(text[: len(text) // 2])
    assert zero("report", path.parent) == zero("report", tmp_path) == 1
    damaged, absent = capsys.readouterr().err.splitlines()
    assert "not a whole one" in damaged
    assert "expected zero-report-rank0.txt" in absent


def _line_of(comment: str) -> str:
    lines = SCRIPT.splitlines()
    return f"train.py:{next(i for i, line in enumerate(lines, 1) if line.endswith(comment))}"


def test_a_rank_that_is_in_a_collective_of_torchs_says_where(tmp_path: Path, job: Job) -> None:
    """Its peer runs a batch more. Torch's error, that a connection was closed, says nothing."""
    said = job("sums").communicate(timeout=100)[0]

    cause = r"^zero_comm: ranks wait for each other (.*\n)+?.*rank 1 is in torch\.distributed\.all"
    assert re.search(cause, said, re.M)
    why = _reports(tmp_path)[1]["report"]["why"]
    assert why.startswith("RuntimeError in torch.distributed: ")
    verdict = failure.summary(tmp_path / "reports").splitlines()[-1]
    expected = r"look at rank 1, in torch\.distributed\.all_reduce\(\) at .*, and rank 0 at "
    assert re.match(rf"{expected}\S*{_line_of('# together')}: one makes this call, or", verdict)
    assert "backward_without_batch(model)" in verdict


def test_a_rank_that_waits_in_torch_for_one_that_has_ended_fails_soon(
    tmp_path: Path, job: Job
) -> None:
    """The other stays for a minute, so that its shards can be read, but keeps no connection."""
    began = time.monotonic()
    said = job("sums-last").communicate(timeout=100)[0]

    assert time.monotonic() - began < 40.0
    assert re.search(
        r"^zero_comm: a collective of torch.distributed failed, as .*ended", said, re.M
    )
    verdict = failure.summary(tmp_path / "reports").splitlines()[-1]
    assert verdict.startswith("look at rank 0, of which there is no report: ended or killed?")
    assert "If it has ended, rank 1 at " in verdict


def test_a_step_that_one_rank_makes_alone_is_found_later(tmp_path: Path, job: Job) -> None:
    """It pairs with the next step of its peer, so that the call that fails is a correct one."""
    job("repeats", ZERO_SANITIZE="1").communicate(timeout=100)

    text = failure.summary(tmp_path / "reports")
    assert "the same error as on rank 0" in text
    first, second = _line_of("# together"), _line_of("# alone")
    verdict = rf"look at rank 0, \S*{first}, and rank 1, \S*{second}: one of them may be"
    assert re.match(verdict, text.splitlines()[-1])


def test_a_report_is_written_through_no_link(tmp_path: Path) -> None:
    """Its name can be guessed, and what a link of that name leads to is somebody's."""
    theirs = tmp_path / "theirs"
    theirs.write_text("kept")
    (tmp_path / "zero-report-rank0.partial").symlink_to(theirs)
    failure.write(tmp_path / "zero-report-rank0.txt", "CommError: here", {})
    assert theirs.read_text() == "kept"
    assert "CommError: here" in (tmp_path / "zero-report-rank0.txt").read_text()
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_reports_of_some_ranks_are_read(tmp_path: Path) -> None:
    """A rank may wait for one beyond those that the others know of."""
    path = tmp_path / "zero-report-rank0.txt"
    failure.write(path, failure.ASKED, {})
    text = path.read_text().replace("[stacks]", "[launched]\nwaits for = rank 5 for 3 s\n[stacks]")
    path.write_text(re.sub("\nranks = .*", "\nranks = 1", text))
    assert "waits for rank 5" in failure.summary(tmp_path)


def test_reports_of_an_earlier_job_are_named_and_not_compared(tmp_path: Path) -> None:
    """A report that was written before the newest one's process started is of another job."""
    for rank in range(3):
        path = tmp_path / f"zero-report-rank{rank}.txt"
        failure.write(path, "CommError: here", {})
        path.write_text(re.sub("\nstarted = .*", f"\nstarted = {STARTED}", path.read_text()))
    theirs = tmp_path / "zero-report-rank2.txt"
    text = re.sub("\ntime = .*", "\ntime = 2020-01-01T00:00:00.000+00:00", theirs.read_text())
    theirs.write_text(re.sub("\nranks = .*", "\nranks = 8", text))
    first, *others = failure.summary(tmp_path).splitlines()
    assert first == f"{theirs}: of a job before {STARTED}; not compared"
    assert not [line for line in others if "rank 2" in line or "rank 7" in line]


def test_the_users_line_is_that_of_the_users_own_file(tmp_path: Path) -> None:
    """Not of the library of a trainer, which the user has not written."""
    frames = {"/home/train.py": 9, "/lib/site-packages/transformers/trainer.py": 4133}
    frames |= {"/lib/site-packages/zero_engine/x.py": 5}
    lines = (f'  File "{file}", line {line}, in f' for file, line in frames.items())
    why = "\n".join(("CommError: here", "Traceback (most recent call last):", *lines))
    failure.write(tmp_path / "zero-report-rank0.txt", why, {})
    assert "at /home/train.py:9" in failure.summary(tmp_path)


def test_a_process_is_as_old_as_it_is() -> None:
    """Not as the first model in it: a rank may fail before another has made one."""
    program = "import time; time.sleep(1); from zero_comm.failure import started; print(started())"
    before = time.time()
    said = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    assert before - 0.1 <= float(said.stdout) <= time.time() - 1


def test_who_hangs_is_found_while_the_others_wait_in_c(
    tmp_path: Path, job: Job, zero, capsys
) -> None:
    """No handler of Python's runs there, and no error comes before the timeout.

    The gathers of three units, the window, are launched ahead: that of the fourth waits for a rank
    that does not begin the forward.
    """
    ranks = job("hangs", ZERO_COMM_PEER_MEMORY="0")
    assert [ranks.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    deadline, seen = time.monotonic() + 60, {}
    while not seen or "unit '3'" not in seen[0]["launched"]["waits for"]:
        assert time.monotonic() < deadline
        os.killpg(ranks.pid, signal.SIGUSR1)
        time.sleep(0.5)
        seen = found if len(found := _reports(tmp_path)) == 2 else {}

    first, second = seen[0]["launched"], seen[1]["launched"]
    last = int(first["collectives"])
    assert re.fullmatch(r"rank 1 for \d+ s in gathering unit '3' .*", first["waits for"])
    assert first[str(last)] == "gathering unit '3' (version 2), in flight"
    assert first[str(last - 1)] == "gathering unit '2' (version 2), finished"
    assert (int(second["collectives"]), second["waits for"]) == (last - 1, "no rank")
    assert zero("report", tmp_path / "reports") == 0
    said = capsys.readouterr().out
    counts = f"{last} on rank 0, {last - 1} on rank 1"
    assert f"number of collectives launched so far: {counts}" in said
    assert "look at rank 1 first: rank 0 waits for it" in said
    assert "not compared" not in said, "they were written at different times"


def test_a_backward_that_waits_has_not_failed(tmp_path: Path, job: Job) -> None:
    """Another thread writes the report than the one that autograd runs in."""
    ranks = job("hangs")
    assert [ranks.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    deadline, seen = time.monotonic() + 60, {}
    while not seen or "reducing the gradients" not in seen[0]["launched"]["waits for"]:
        assert time.monotonic() < deadline
        os.killpg(ranks.pid, signal.SIGUSR1)
        time.sleep(0.5)
        seen = found if len(found := _reports(tmp_path)) == 2 else {}
    states = [seen[rank]["schedule"]["state"] for rank in range(2)]
    assert states == ["in backward", "outside forward and backward"]


@pytest.mark.parametrize(
    ("way", "answer"), [("handles", "mine"), ("handles-in-c", "most recent call first")]
)
def test_a_handler_of_the_users_stays(tmp_path: Path, job: Job, way: str, answer: str) -> None:
    """Schedulers send SIGUSR1 too, and programs have learned to answer."""
    ranks = job(way)
    assert [ranks.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    os.killpg(ranks.pid, signal.SIGUSR1)
    assert answer in ranks.stdout.readline()
    assert not _reports(tmp_path)


ALONE: Final = """
import os, signal, torch, zero_engine
_, writes = os.pipe()
os.set_blocking(writes, False)
signal.set_wakeup_fd(writes)
zero_engine.shard(torch.nn.Linear(4, 4))
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
assert signal.set_wakeup_fd(-1) == writes
if not os.fork():
    zero_engine.full_param(torch.ones(1))
assert os.wait()[1]
assert not os.path.exists(os.environ["ZERO_REPORT"])
print("so far, so good", flush=True)
zero_engine.full_param(torch.ones(1))
"""


@pytest.mark.parametrize("folder", ["reports", "off"])
def test_only_the_rank_itself_writes_and_only_if_it_may(tmp_path: Path, folder: str) -> None:
    """Workers of a DataLoader are forks; a wakeup fd is of an event loop that somebody runs."""
    env = os.environ | {"ZERO_REPORT": folder}
    ran = subprocess.run(
        [sys.executable, "-c", ALONE], env=env, cwd=tmp_path, stdout=-1, check=False
    )

    assert ran.stdout == b"so far, so good\n"
    assert len(_reports(tmp_path)) == (folder != "off")
    assert not (tmp_path / "off").exists()


def test_an_error_that_all_ranks_have_names_the_rank(tmp_path: Path) -> None:
    """Which of them has written first says nothing."""
    for rank in (1, 0):
        why = "SanitizerError: parameter '0.weight' (rank 0): expected one, found other"
        failure.write(
            tmp_path / f"zero-report-rank{rank}.txt",
            f"{why}\n{failure._TRACEBACK}\nof rank {rank}",
            {},
        )
    for path in tmp_path.glob("*.txt"):
        path.write_text(re.sub("\nranks = .*", "\nranks = 2", path.read_text()))
    assert failure.summary(tmp_path).splitlines()[-1].startswith("look at rank 0 first: the error")


def test_a_report_does_not_ask_for_what_was_done(tmp_path: Path) -> None:
    """Values that ranks compare are told in full; and the sanitizer was on."""
    errors = ("AgreementError: ranks disagree on param_groups[0]['lr']", "DivergenceError: apart")
    for why, says in zip(
        errors, ("the error of all ranks says", "no rank stands out"), strict=True
    ):
        for rank in (0, 1):
            environment = {"ZERO_SANITIZE": "1", "WORLD_SIZE": "2"}
            with mock.patch.dict(os.environ, environment):
                text = f"{why} (seen on rank {rank})\n{failure._TRACEBACK}\n"
                failure.write(tmp_path / f"zero-report-rank{rank}.txt", text, {})
        verdict = failure.summary(tmp_path).splitlines()[-1]
        assert verdict.startswith(says)
        assert "ZERO_SANITIZE" not in verdict
