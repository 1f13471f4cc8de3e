# SPDX-License-Identifier: Apache-2.0
"""The end-to-end benchmark without its servers: arithmetic, what counts as right, bars, table, options, clean-up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from datadist_core.bench import options
from datadist_core.testing.parallel import eventually
from vllm_datadist.bench import __main__ as command
from vllm_datadist.bench import measure, servers
from vllm_datadist.bench.contenders import DEFAULT_BACKENDS, OURS, PEERS, contenders_of
from vllm_datadist.bench.http_calls import Counters, RequestFailed, complete, is_ready, parse_counters
from vllm_datadist.bench.measure import Pair, Plan, Prompt, why_wrong_source, why_wrong_text
from vllm_datadist.bench.model import ServedModel, UnusableModel, read_model
from vllm_datadist.bench.plot import plot
from vllm_datadist.bench.report import results_table, to_json, write_report
from vllm_datadist.bench.results import Results, Row, Sample, check_bars, make_row
from vllm_datadist.bench.servers import Server, ServerFailed, ServerSetup, running

KV_BYTES = 513 << 17
CONFIG = {
    "vocab_size": 258,
    "max_position_embeddings": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def row(name: str, added_ms: float, tokens: int = 513, first_ms: float | None = None, verified: bool = True) -> Row:
    made = make_row(name, tokens, KV_BYTES, [Sample(20 + added_ms, (20.0,))], [] if first_ms is None else [first_ms])
    return replace(made, verified=verified)


# -- arithmetic


def test_row_has_medians() -> None:
    samples = [Sample(30, (10, 12, 900)), Sample(100, (11, 20, 10)), Sample(45, (20, 20, 20))]
    made = make_row("auto", 513, KV_BYTES, samples, [150.0, 90.0, 130.0])
    assert (made.added_ms, made.added_ms_min, made.added_ms_max) == (25, 10, 80)
    assert (made.request_ms, made.cached_ms, made.first_request_ms, made.num_samples) == (45, 20, 130, 3)
    assert made.verified


def test_one_wrong_sample_makes_the_row_wrong() -> None:
    assert not make_row("auto", 513, KV_BYTES, [Sample(30, (10,)), Sample(30, (10,), "wrong")], []).verified


@pytest.mark.parametrize(
    ("first", "text", "is_right"),
    [([7], [7, 8, 9], True), ([6], [7, 8, 9], False), ([7], [7, 8, 5], False), ([], [7, 8, 9], False)],
)
def test_text_must_be_the_prefill_servers_own(first: list[int], text: list[int], is_right: bool) -> None:
    assert (why_wrong_text([7, 8, 9], first, text) == "") is is_right


@pytest.mark.parametrize(
    ("external", "local", "is_right"),
    [
        (513, 4 * 512, True),
        (512, 4 * 512, True),  # a connector may leave the last token to D
        (0, 5 * 512, False),  # D had it all along
        (0, 4 * 512, False),  # D prefilled itself
        (513, 3 * 512, False),  # one of the requests to compare with was not served from D's cache
    ],
)
def test_kv_cache_must_come_from_where_it_should(external: int, local: int, is_right: bool) -> None:
    before, after = Counters(1000, 5000, {}), Counters(1000 + external, 5000 + local, {})
    assert (why_wrong_source(before, after, 513) == "") is is_right


def test_counters_are_read_from_the_metrics_page() -> None:
    text = """# HELP vllm:prefix_cache_hits_total x
vllm:prefix_cache_hits_total{engine="0",model_name="a b"} 512.0
vllm:prefix_cache_hits_created{engine="0"} 1.79e+09
vllm:external_prefix_cache_hits_total{engine="0"} 513.0
vllm:external_prefix_cache_hits_total{engine="1"} 7.0
vllm:datadist_transfer_bytes_total{backend="shm",engine="0"} 1e+06
"""
    assert parse_counters(text) == Counters(520.0, 512.0, {"shm": 1e6})


# -- bars


def bars(*rows: Row, **reasons: dict[str, str]) -> list[tuple[str, bool | None]]:
    return [(bar.found, bar.met) for bar in check_bars(Results(rows=list(rows), **reasons))]


def test_bars_met() -> None:
    added, first = bars(row("auto", 10, first_ms=100), row("nixl", 100))
    assert added == ("0.10 x: auto 10.0, nixl 100.0 ms (513 tokens; smallest 10.0 and 100.0)", True)
    assert first == ("70 ms more: auto 100, later 30 ms (513 tokens)", True)


def test_worst_length_decides_and_short_prompts_do_not_count() -> None:
    rows = [row("auto", 90, 129), row("nixl", 100, 129), row("auto", 10), row("nixl", 100)]
    rows += [row("auto", 25, 2049), row("nixl", 100, 2049)]
    assert bars(*rows)[0] == ("0.25 x: auto 25.0, nixl 100.0 ms (2049 tokens; smallest 25.0 and 100.0)", False)


def test_slow_first_request_is_a_missed_bar() -> None:
    assert bars(row("auto", 10, first_ms=231))[1] == ("201 ms more: auto 231, later 30 ms (513 tokens)", False)


def test_wrong_text_meets_no_bar() -> None:
    assert bars(row("auto", 10, verified=False), row("nixl", 100))[0][1] is None


def test_bar_says_why_there_is_nothing_to_compare_with() -> None:
    found = bars(row("auto", 10), skipped={"nixl": "the package nixl is not installed\nmore"})[0]
    assert found == ("not measured: nixl: the package nixl is not installed", None)
    assert bars() == [("not measured in this run", None)] * 2


def test_without_auto_the_first_backend_of_ours_is_judged() -> None:
    found, met = bars(row("nixl", 100), row("tcp", 30))[0]
    assert (found.startswith("0.30 x: tcp 30.0, nixl 100.0 ms"), met) == (True, False)


# -- output


def test_table_has_a_line_per_row_by_length(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("auto", 10, first_ms=90), row("auto", 20, 2049), row("nixl", 40), row("nixl", 80, 2049, verified=False)]
    results = Results(rows=rows, bytes_over={"auto": ("shm",)}, failed={"nixl": "wrong text"})
    cells = results_table(results).rows
    assert [(line[0], line[2], line[6], line[-1]) for line in cells] == [
        ("513", "auto", "0.25", "yes"), ("513", "nixl", "1.00", "yes"),
        ("2049", "auto", "0.25", "yes"), ("2049", "nixl", "1.00", "NO"),
    ]  # fmt: skip
    write_report(results)
    shown = capsys.readouterr().out
    for text in ("auto: bytes moved over shm.", "FAILED nixl: wrong text", "MISSED", "<= 0.2 x NixlConnector's"):
        assert text in shown


def test_json_has_the_promised_fields() -> None:
    [made] = json.loads(json.dumps(to_json(Results(rows=[row("auto", 10, first_ms=90)]))))["rows"]
    promised = {"name": "auto", "tokens": 513, "kv_bytes": KV_BYTES, "added_ms": 10, "added_ms_min": 10}
    promised |= {"added_ms_max": 10, "first_request_ms": 90, "verified": True}
    assert promised.items() <= made.items()


@pytest.mark.slow
def test_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(Results(rows=[row("auto", 10), row("nixl", 100), row("tcp", -1)]), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


# -- contenders


def test_peer_runs_next_to_the_first_of_ours() -> None:
    assert [each.name for each in contenders_of(("auto", "nixl"), ("nixl",))] == ["auto", "nixl", "datadist-nixl"]


def test_each_server_of_the_nixl_connector_has_its_own_port() -> None:
    ports = {PEERS["nixl"].make_env()["VLLM_NIXL_SIDE_CHANNEL_PORT"] for _ in range(2)}
    assert len(ports) == 2


def test_our_backend_is_named_in_the_transfer_config() -> None:
    config = OURS["tcp"].transfer_config("kv_consumer")
    assert (config["kv_connector"], config["kv_role"]) == ("DataDistConnector", "kv_consumer")
    assert config["kv_connector_extra_config"]["transfer_backend"] == "tcp"


def test_contender_without_its_package_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "make_kv_heavy_model", write_config)
    monkeypatch.setitem(PEERS, "nixl", replace(PEERS["nixl"], packages=("no_such_package",)))
    results = measure.run(Plan((), ("nixl",), (129,), 1, 1, None), lambda _: None)
    assert (results.rows, results.skipped) == ([], {"nixl": "the package no_such_package is not installed"})


# -- model


def write_config(folder: Path, **changes: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (CONFIG | changes).items() if v is not None}))


def test_kv_bytes_per_token(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert read_model(tmp_path).kv_bytes_per_token == 8 * 2 * 4 * 128 * 4
    write_config(tmp_path, num_key_value_heads=None, head_dim=None, hidden_size=256)
    assert read_model(tmp_path).kv_bytes_per_token == 8 * 2 * 256 * 4
    write_config(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64)
    assert read_model(tmp_path).kv_bytes_per_token == 8 * 576 * 4


def test_model_without_a_needed_field_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, num_hidden_layers=None)
    with pytest.raises(UnusableModel, match="has no 'num_hidden_layers'"):
        read_model(tmp_path)


# -- options


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--backends", "auto,foo"], ["--backends", "'foo'", "use auto, shm, cma, tcp, nixl, mooncake"]),
        (["--peers", "vllm"], ["--peers", "'vllm'", "use nixl"]),
        (["--tokens", "129,200"], ["--tokens", "'200'", "multiple of 128 plus 1"]),
        (["--tokens", "1"], ["--tokens", "'1'", "from 129"]),
        (["--tokens", "8193"], ["--tokens", "'8193'", "to 8065"]),
        (["--repeats", "0"], ["--repeats", "'0'", "from 1 to"]),
        (["--rounds", "x"], ["--rounds", "'x'", "from 1 to"]),
        (["--model", "/no/such"], ["--model", "/no/such", "name a folder with a model"]),
        (["--json", "/no/such/file"], ["--json", "'/no/such/file'", "make it, or name another file"]),
    ],
)
def test_bad_option_names_argument_value_and_remedy(
    arguments: list[str], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(arguments)
    shown = capsys.readouterr().err
    assert refused.value.code == 2
    assert [text for text in texts if text not in shown] == []


def test_prompt_too_long_for_the_model_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path)
    with pytest.raises(SystemExit):
        command.main(["--model", str(tmp_path), "--tokens", "513,1025"])
    assert "1025 is too long" in capsys.readouterr().err


def test_plot_without_matplotlib_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "can_plot", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["--plot", "bench.png"])
    assert "'bench.png': a picture needs matplotlib; pip install" in capsys.readouterr().err


def test_options_reach_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans: list[Plan] = []

    def fake_run(plan: Plan, progress: Callable[[str], None]) -> Results:
        plans.append(plan)
        return Results(rows=[row("auto", 10)])

    monkeypatch.setattr(command, "run", fake_run)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    file = tmp_path / "bench.json"
    arguments = ["--peers", "none", "--tokens", "513,129,513", "--repeats", "3", "--rounds", "2", "--json", str(file)]
    assert command.main(arguments) == 0
    assert plans == [Plan(DEFAULT_BACKENDS, (), (513, 129), 3, 2, None)]
    assert json.loads(file.read_text())["rows"][0]["added_ms"] == 10


@pytest.mark.parametrize(
    ("results", "status"),
    [
        (Results(rows=[row("auto", 10)]), 0),
        (Results(rows=[row("auto", 10)], failed={"nixl": "broke"}, skipped={"cma": "no"}), 0),
        (Results(rows=[row("auto", 10)], failed={"tcp": "broke"}), 1),
        (Results(rows=[row("auto", 10, verified=False)]), 1),
        (Results(skipped={"auto": "no"}), 1),
    ],
)
def test_exit_status(results: Results, status: int) -> None:
    assert command._exit_status(results) == status


# -- requests and samples, with a stand-in for both servers


class FakeVllm(BaseHTTPRequestHandler):
    """Stands in for P and D in one: answers token 1, 2, 3, ... and counts as D would."""

    external = local = 0
    known: set[str] = set()  # noqa: RUF012  set anew by the fixture
    shift = 0
    gives_ticket = True

    def do_GET(self) -> None:
        cls = type(self)
        self._send(200, f"{measure_names[0]} {cls.external}\n{measure_names[1]} {cls.local}\n".encode())

    def do_POST(self) -> None:
        cls, body = type(self), json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(body["prompt"]) == 1:
            self._send(400, b"too short")
            return
        ticket, salt = body.get("kv_transfer_params"), body.get("cache_salt")
        answer: dict[str, object] = {"choices": [{"token_ids": list(range(1, 1 + body["max_tokens"]))}]}
        if ticket == measure.ASK_FOR_TICKET:
            answer["kv_transfer_params"] = {"do_remote_prefill": True} if cls.gives_ticket else None
        elif ticket is not None:
            cls.external += len(body["prompt"])
            cls.known.add(salt)
        elif salt in cls.known:
            cls.local += (len(body["prompt"]) - 1) // 128 * 128
            answer["choices"] = [{"token_ids": [token + cls.shift for token in range(1, 1 + body["max_tokens"])]}]
        self._send(200, json.dumps(answer).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


measure_names = ("vllm:external_prefix_cache_hits_total", "vllm:prefix_cache_hits_total")


@pytest.fixture
def fake() -> Iterator[type[FakeVllm]]:
    handler = type("Handler", (FakeVllm,), {"known": set()})
    server = HTTPServer(("127.0.0.1", 0), handler)
    handler.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield handler
    server.shutdown()
    server.server_close()
    thread.join(5)


def sample(fake: type[FakeVllm]) -> Sample:
    pair = Pair(fake.port, fake.port, 258)
    return pair.sample(pair.new_prompt(257))


def test_sample_of_a_right_hand_off(fake: type[FakeVllm]) -> None:
    made = sample(fake)
    assert made.problem == ""
    assert made.request_ms > 0
    assert len([ms for ms in made.cached_ms if ms > 0]) == 3
    assert (fake.external, fake.local) == (257, 4 * 256)


def test_sample_with_wrong_text(fake: type[FakeVllm]) -> None:
    fake.shift = 1
    assert sample(fake).problem == "D's text is wrong: [1] and [2, 3, 4, 5, 6, 7], P's own is [1, 2, 3, 4, 5, 6]"


def test_sample_whose_kv_cache_did_not_come_from_the_prefill_server(
    fake: type[FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "COUNTERS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(measure, "NUM_CACHED", 2)
    fake.known = SaltsAlwaysKnown()
    fake.external = -257
    pair = Pair(fake.port, fake.port, 258)
    before = Counters(fake.external, 0, {})
    complete(fake.port, [1] * 257, 1, salt="a")
    assert pair._why_wrong_source(before, 257) == "D had 0 tokens from P and 256 in its cache, not 257 and 768"


class SaltsAlwaysKnown(set[str]):
    def __contains__(self, _: object) -> bool:
        return True


def test_no_ticket_is_an_error(fake: type[FakeVllm]) -> None:
    fake.gives_ticket = False
    with pytest.raises(RequestFailed, match="no ticket"):
        Pair(fake.port, fake.port, 258).hand_off(Prompt([1, 2]), "salt")


def test_error_answer_is_an_error_with_its_text(fake: type[FakeVllm]) -> None:
    with pytest.raises(RequestFailed, match="400 too short"):
        complete(fake.port, [1], 1)


def test_prompts_differ(fake: type[FakeVllm]) -> None:
    pair = Pair(fake.port, fake.port, 258)
    assert pair.new_prompt(129).token_ids != pair.new_prompt(129).token_ids


# -- servers, with a stand-in for vLLM

CHILD = """
import subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print("child", child.pid, flush=True)
{then}
"""


@pytest.fixture
def setup(tmp_path: Path) -> ServerSetup:
    return ServerSetup(ServedModel(tmp_path, 258, 8192, 1 << 17), 128, 36, 4103)


def start(setup: ServerSetup, program: str, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(servers, "_command", lambda *_: [sys.executable, "-c", program])
    return Server("P", setup, {}, {}, setup.model.path / "P.log")


def test_kv_cache_space_is_enough(setup: ServerSetup) -> None:
    assert setup.kv_cache_gib << 30 >= setup.num_blocks * setup.block_tokens * setup.model.kv_bytes_per_token


def test_server_that_ends_is_told_with_its_log(setup: ServerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(setup, "print('no memory'); raise SystemExit(3)", monkeypatch)
    with pytest.raises(ServerFailed, match=r"P ended by itself \(3\):\nno memory"):
        server.wait_ready(time.monotonic() + 30, lambda _: None)
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("then", ["time.sleep(99)", "raise SystemExit(1)"])
def test_stop_ends_the_whole_tree_by_force_if_need_be(
    then: str, setup: ServerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(setup, CHILD.format(then=then), monkeypatch)
    eventually(lambda: "child" in server.log_tail())
    child = psutil.Process(int(server.log_tail().split()[1]))
    server.stop()
    assert not child.is_running()


def test_all_are_stopped_if_one_does_not_start(setup: ServerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    good = start(setup, "import time; time.sleep(99)", monkeypatch)
    bad = start(setup, "raise SystemExit(1)", monkeypatch)
    with pytest.raises(ServerFailed), running([lambda: bad, lambda: good], lambda _: None):
        pytest.fail("it must not get here")
    assert good._process.poll() is not None


def test_unreachable_port_is_not_ready() -> None:
    assert not is_ready(servers.free_port())


def test_command_line_shows_help_without_vllm_being_imported() -> None:
    program = "import sys; sys.modules['vllm'] = None; from vllm_datadist.bench.__main__ import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--backends" in done.stdout
