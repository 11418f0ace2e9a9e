# SPDX-License-Identifier: Apache-2.0
"""Whether the example that learns text trains as one device does, resumes bit for bit, and refuses a useless corpus."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ("--data", str(EXAMPLES), "--length", "128", "--layers", "2", "--width", "64", "--hidden", "128",
         "--head-size", "16", "--sample", "0")  # fmt: skip
EVERY_STEP = ("--steps", "4", "--save-every", "2", "--print-every", "1")
# Seconds that a test waits for a process; it is then killed.
PATIENCE = 200
# Compiling takes most of the time of these tests; sessions of nox pass more flags against it.
UNOPTIMISED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def started(*arguments: str) -> subprocess.Popen:
    environment = {"XLA_FLAGS": UNOPTIMISED} | os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def outputs(*processes: subprocess.Popen, status: int = 0) -> list[str]:
    """What each process printed. All have to end, and with this status."""
    try:
        found = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == status for process in processes), found
    return found


def losses(folder: Path) -> dict[str, float]:
    """The losses in full precision."""
    return json.loads((folder / "run.json").read_text())["losses"]


def test_it_trains_as_one_device_does_and_resumes_bit_for_bit_and_on_two_processes(tmp_path: Path):
    saved = tmp_path / "checkpoints"
    training = (
        str(EXAMPLES / "train_text.py"),
        *SMALL,
        *EVERY_STEP,
        "--checkpoints",
        str(saved),
        "--out",
        str(tmp_path),
    )
    (output,) = outputs(started(*training, "--cpu", "8", "--check"))
    unbroken = losses(tmp_path)
    assert [*unbroken] == ["1", "2", "3", "4"] and (tmp_path / "curves.png").exists()
    assert "Every loss equals that of one device" in output.splitlines()[-1]

    shutil.rmtree(saved / "4")
    (output,) = outputs(started(*training, "--cpu", "8"))
    assert "resumed after step 2" in output and losses(tmp_path) == unbroken
    assert not re.search(r"^step 2/4 ", output, re.MULTILINE)

    shutil.rmtree(saved / "4")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    join = [("--cpu", "4", "--heartbeat", "60", "--distributed", f"{coordinator},2,{n}") for n in range(2)]
    first, second = outputs(*(started(*training, *options) for options in join))
    assert "resumed after step 2" in first and "loss" not in second, "only process 0 prints"
    assert all(abs(loss - unbroken[step]) < 1e-5 for step, loss in losses(tmp_path).items())


def test_losses_that_differ_from_one_device_end_with_status_1(tmp_path: Path):
    code = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_text as example
sys.argv[1:] = ["--cpu", "8", "--check", "--data", {str(EXAMPLES)!r}]
example.train = lambda a, corpus, mesh, say: example.Result({{1: 4.0 + mesh.size / 100}})
example.finish = lambda *_: None
example.main()
"""
    (output,) = outputs(started("-c", code), status=1)
    assert "The losses differ from those of one device by 7.0e-02, more than 0.0001." in output


def test_a_row_is_a_piece_of_a_stream_in_which_no_token_predicts_the_next_document(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from text_corpus import Corpus

    documents = [np.frombuffer(b"\0" + text, np.uint8) for text in (b"ab", b"cdefg", b"h")]
    corpus = Corpus(documents, [])
    rows = [corpus.row(number, 4, joined=False) for number in range(4)]
    stream = corpus.stream(0)
    assert bytes(sorted(stream)) == b"\0\0\0abcdefgh", "every document once an epoch"
    assert [*rows[0]["tokens"], *rows[1]["tokens"]] == [*stream[:8]]
    for row in rows:
        begins = row["tokens"] == 0
        assert (row["labels"][:-1] == np.where(begins, -1, row["tokens"])[1:]).all()
        assert (np.diff(row["segments"]) == begins[1:]).all()
        assert row["positions"][0] == 0
        assert (row["positions"][1:] == np.where(begins[1:], 0, row["positions"][:-1] + 1)).all()
    assert (rows[2]["tokens"] == corpus.row(2, 4, joined=True)["tokens"]).all()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "is empty: it has 0 files"),
        ({"a.txt": b"", "b.txt": b" \n"}, "is empty: it has 2 files"),
        ({"a.bin": b"\0\1text", "b.bin": b"\xff\xfe"}, "is binary: none of its 2 files is text"),
        ({"a.txt": b"some text"}, "has 10 bytes of text for training, and a batch takes 64"),
    ],
)
def test_a_corpus_of_which_no_batch_can_be_made_is_refused_in_a_sentence(
    files: dict[str, bytes], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(EXAMPLES)
    import text_corpus

    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=why):
        text_corpus.read(tmp_path, 64)
    with pytest.raises(SystemExit, match="There is no folder or file"):
        text_corpus.read(tmp_path / "absent", 64)


def test_the_means_of_losses_are_those_of_their_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.syspath_prepend(EXAMPLES)
    import text_curves

    losses = {str(step): float(step) for step in (*range(10, 13), *range(1, 10))}
    text_curves.print_means({"a run": {"losses": losses, "positions": [(0, 1.5), (9, None)]}}, steps=4)
    assert capsys.readouterr().out.splitlines() == [
        "a run, every 4 steps: 2.500 6.500 10.500",
        "a run, held out, by position: 1.50",
    ]
