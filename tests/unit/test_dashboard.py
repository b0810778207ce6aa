"""The live page: what it answers to whom, what it shows, and when it reads and draws again."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_runs import make_run

from kaitian_mpi.cli import report
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.observe import loopback
from kaitian_mpi.observe.dashboard import budget, live_run
from kaitian_mpi.observe.dashboard.assets import COLORS, STYLE, TEXTS
from kaitian_mpi.observe.dashboard.budget import Budget, SpareCores
from kaitian_mpi.observe.dashboard.live_run import NARROW, LiveRun
from kaitian_mpi.observe.dashboard.page import render_page
from kaitian_mpi.observe.dashboard.server import DashboardServer
from kaitian_mpi.observe.report.figures import FIGURES, FigureSpec
from kaitian_mpi.train import live_page

TOKEN = "a-token"


def spec(name="loss", draw=lambda run: None):
    return FigureSpec(name, f"The {name}", "How to read it.", draw, lambda run: f"{name} in words")


@pytest.fixture
def folder(tmp_path):
    make_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def ask(folder):
    """Return what asks a server for a path, and returns status, headers and content."""
    listener = loopback.listen_on_loopback(0, "--dashboard")
    server = DashboardServer(listener, LiveRun(folder, [spec()]), TOKEN)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def ask(path, method="GET", **headers):
        connection = http.client.HTTPConnection(*server.server_address, timeout=10)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()

    ask.address = server.server_address
    yield ask
    server.shutdown()
    thread.join()
    server.server_close()


# What it answers


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/{TOKEN}/", 200),
        (f"/{TOKEN}/?x=1", 200),
        (f"/{TOKEN}", 308),
        (f"/{TOKEN}/state.json", 200),
        (f"/{TOKEN}/update.html", 200),
        (f"/{TOKEN}/figures/loss.svg?v=3", 200),
        (f"/{TOKEN}/narrow/loss.svg", 200),
        ("/", 403),
        ("/wrong/", 403),
        (f"/{TOKEN}x/state.json", 403),
        (f"/x/{TOKEN}/", 403),
        ("/state.json", 403),
        (f"/{TOKEN}/figures/", 404),
        (f"/{TOKEN}/figures/other.svg", 404),
        (f"/{TOKEN}/config.json", 404),
        (f"/{TOKEN}/../config.json", 404),
        (f"/{TOKEN}/figures/../../../../etc/passwd", 404),
        (f"/{TOKEN}/%2e%2e/%2e%2e/etc/passwd", 404),
        (f"/{TOKEN}//etc/passwd", 404),
        (f"/{TOKEN}/\\..\\config.json", 404),
    ],
)
def test_only_fixed_addresses_behind_the_token_are_answered(ask, path, status):
    found, headers, content = ask(path)
    assert found == status
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
    assert int(headers["Content-Length"]) == len(content.encode())
    if status != 200:
        assert "loss" not in content
        assert "root:" not in content
        assert "config" not in content


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:9000", 200),  # of a tunnel
        ("[::1]:9000", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost:80:80", 421),
        ("localhost@evil.example", 421),
        ("", 421),
    ],
)
def test_another_name_for_this_host_is_refused(ask, host, status):
    assert ask(f"/{TOKEN}/state.json", Host=host)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "X"])
def test_nothing_can_be_changed(ask, method):
    status, headers, _ = ask(f"/{TOKEN}/", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_head_has_no_content(ask):
    status, headers, content = ask(f"/{TOKEN}/", "HEAD")
    assert (status, content) == (200, "")
    assert int(headers["Content-Length"]) > 1000


def test_malformed_requests_do_no_harm(ask):
    for sent in (b"\0" * 100, b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET /" + b"a" * 99_999):
        with (
            socket.create_connection(ask.address, timeout=5) as client,
            suppress(ConnectionError),  # closed before all was read
        ):
            client.sendall(sent)
            with suppress(OSError):
                client.shutdown(socket.SHUT_WR)
            assert b"Traceback" not in client.recv(1 << 16)
    assert ask(f"/{TOKEN}/")[0] == 200


def test_silent_clients_take_a_limited_number_of_threads(ask):
    clients = [socket.create_connection(ask.address, timeout=5) for _ in range(40)]
    deadline = time.monotonic() + 5
    while all(client.fileno() >= 0 for client in clients) and time.monotonic() < deadline:
        clients[-1].settimeout(0.05)
        try:
            closed = clients[-1].recv(1) == b""
        except TimeoutError:
            continue
        assert closed
        break
    assert sum("process_request" in thread.name for thread in threading.enumerate()) == 32
    for client in clients:
        client.close()


# What it shows


class Elements(HTMLParser):
    """Collects the elements of a page, with their attributes."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def page_of(folder, specs=FIGURES):
    live = LiveRun(folder, specs)
    shown, drawn = live.refresh()
    return render_page(live, shown, drawn, "a-nonce")


def test_page_shows_the_newest_numbers(folder):
    page = page_of(folder)
    readings = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [reading for reading in readings if "loss" in reading][-1]
    held_out = [line["validation"] for line in readings if "validation" in line][-1]
    assert f'<span class="value">{last["step"]}</span>' in page
    assert f'<span class="value">{last["loss"]:.4g}</span>' in page
    for name, value in held_out.items():
        assert f"held-out {name}" in page
        assert f'<span class="value">{value:.4g}</span>' in page
    assert "emulated devices" in page


def test_page_is_accessible_without_mouse_or_script(folder):
    page = Elements(page_of(folder))
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == 1
    assert [image["src"] for image in page.all("img")] == [
        f"figures/{spec.name}.svg?v={page.all('body')[0]['data-figures']}" for spec in FIGURES
    ]
    assert all(len(image["alt"]) > 20 for image in page.all("img"))
    assert {"http-equiv": "refresh", "content": "10"} in page.all("meta")
    assert len(page.all("button")) == 1
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.found:
        assert attributes.get("aria-labelledby", ids[0]) in ids
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        assert not attributes.get("src", "").startswith("http")
    assert {attributes["nonce"] for attributes in page.all("script") + page.all("style")} == {
        "a-nonce"
    }


def test_text_of_a_run_is_escaped(tmp_path):
    folder = tmp_path / "<script>alert(1)<"
    make_run(folder)
    evil = "<img src=x onerror=alert(1)>\" '"
    with (folder / "events.jsonl").open("a") as file:
        event = {"step": 999, "time": 1.9e9, "kind": "slow", "text": evil, "ranks": [0]}
        file.write(json.dumps({**event, "details": {}}) + "\n")
    page = page_of(folder, [replace(spec(), title=evil, explanation=evil)])
    assert "<img src=x" not in page
    assert "<script>" not in page
    assert page.count("&lt;img src=x") >= 2


@pytest.mark.parametrize("content", ["", "{}\n", '{"step": "x"}\n', "[]\nnull\n\0\n", '{"step'])
def test_a_damaged_or_empty_run_still_has_a_page(tmp_path, content):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text(content)
    page = page_of(tmp_path)
    assert "The first numbers come with the first steps." in page
    assert "starting" in page


def test_a_run_without_recent_changes_is_not_called_training(folder):
    (folder / "summary.json").unlink()  # which says that it is finished
    now = time.time()
    assert ">training<" in page_of(folder)
    for path in folder.glob("*.json*"):
        os.utime(path, (now - 185, now - 185))
    page = page_of(folder)
    assert ">not finished<" in page
    assert ">training<" not in page
    assert LiveRun(folder, []).refresh()[0].minutes_old == 3


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("text", "ground"), TEXTS)
def test_text_has_enough_contrast(text, ground):
    """WCAG 2.2, level AA: at least 4.5."""
    bright, dark = sorted((luminance(COLORS[text]), luminance(COLORS[ground])), reverse=True)
    assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_every_color_of_text_is_checked():
    used = set(re.findall(r"[ {;]color: var\(--([a-z-]+)\)", STYLE))
    assert used <= {text for text, _ in TEXTS}
    grounds = set(re.findall(r"background: var\(--([a-z-]+)\)", STYLE))
    assert grounds <= {ground for _, ground in TEXTS}


# When it reads and draws


@pytest.fixture
def unhurried(monkeypatch):
    monkeypatch.setattr(live_run, "_MIN_INTERVAL_SEC", 0.0)
    monkeypatch.setattr(budget, "MIN_SHARE", 1e9)
    monkeypatch.setattr(budget, "MAX_SHARE", 1e9)


def test_a_folder_is_read_and_drawn_only_when_it_has_changed(folder, unhurried):
    drawn = []
    live = LiveRun(folder, [spec("a", drawn.append), spec("b", drawn.append)])
    (shown, figures), again = live.refresh(), live.refresh()
    assert again == (shown, figures)
    assert shown.version == figures
    assert not drawn
    for _ in range(3):
        live.figure("a")
    assert len(drawn) == 1
    live.figure("a", NARROW)
    assert len(drawn) == 2
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5000, "loss": 0.25, "time": 1.9e9}) + "\n")
    later, figures = live.refresh()
    assert later.version == figures != shown.version
    assert later.run.intervals[-1].step == 5000
    live.figure("a")
    assert [run.intervals[-1].step for run in drawn[1:]] == [drawn[0].intervals[-1].step, 5000]


def test_figures_wait_if_they_would_use_too_much_of_a_core(folder, monkeypatch):
    monkeypatch.setattr(live_run, "_MIN_INTERVAL_SEC", 0.0)
    monkeypatch.setattr(budget, "MAX_SHARE", 1e-9)
    live = LiveRun(folder, [spec()])
    live._reading = Budget(lambda: 1.0, lambda: float("inf"))  # reading is free
    first, _ = live.refresh()
    live.figure("loss")
    os.utime(folder / "metrics.jsonl", (1, 1))
    shown, figures = live.refresh()
    assert shown.version != figures == first.version


def test_budget_spreads_work_over_time():
    now, share = 100.0, 0.25
    spread = Budget(lambda: share, lambda: now)
    assert spread.is_free()
    spread.spend(1.0)
    now += 3.99
    assert not spread.is_free()
    now += 0.02
    assert spread.is_free()
    share = 0.5
    spread.spend(1.0)
    now += 2.01
    assert spread.is_free()


@pytest.mark.parametrize(("idle", "share"), [(0.0, 0.01), (0.1, 0.01), (1.0, 0.1), (60.0, 0.2)])
def test_the_share_of_a_core_grows_with_the_idle_cores(monkeypatch, idle, share):
    now = 100.0
    monkeypatch.setattr(budget.time, "monotonic", lambda: now)
    spare = SpareCores(lambda: 7.0 + idle * (now - 100.0))
    assert spare.share() == budget.MIN_SHARE
    now += 0.5
    assert spare.share() == budget.MIN_SHARE, "too early to tell"
    now += 1.5
    assert spare.share() == pytest.approx(share)


def test_idle_cores_are_those_that_the_process_may_use(monkeypatch):
    own = os.sched_getaffinity(0)
    times = [SimpleNamespace(idle=10.0**core) for core in range(max(own) + 1)]
    monkeypatch.setattr(budget.psutil, "cpu_times", lambda percpu: times)
    os.sched_setaffinity(0, {min(own)})
    try:
        assert budget._idle_sec() == 10.0 ** min(own)
        budget.use_cores_of_launcher(os.getpid())
        assert os.sched_getaffinity(0) == os.sched_getaffinity(os.getppid())
    finally:
        os.sched_setaffinity(0, own)


def test_page_survives_a_failing_figure_and_a_missing_folder(folder, unhurried):
    def fail(run):
        raise ZeroDivisionError("<planted>")

    live = LiveRun(folder, [spec(draw=fail)])
    live.refresh()
    svg = live.figure("loss").decode()
    assert "The loss: could not be drawn (ZeroDivisionError)" in svg
    folder.rename(folder.with_name("elsewhere"))
    shown, drawn = live.refresh()
    assert "found no such folder" in shown.fault
    page = render_page(live, shown, drawn, "n")
    assert "found no such folder" in page
    assert "held-out" in page


def test_figures_are_drawn_for_wide_and_narrow_pages(folder):
    live = LiveRun(folder)
    live.refresh()
    for name, widths in (("learning", (672, 422)),):
        for width, pixels in zip((live_run.WIDE, NARROW), widths, strict=True):
            svg = live.figure(name, width).decode()
            assert svg.startswith("<svg ")
            assert f'width="{pixels}"' in svg


# Port, token and process


def test_a_port_listens_on_loopback_only_and_is_taken_once(capsys):
    with loopback.listen_on_loopback(0, "--dashboard") as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(UserError, match=rf"--dashboard {port}: Address already in use on 127"):
            loopback.listen_on_loopback(port, "--dashboard", wait_sec=0)
        loopback.show_address(port, "t")
        shown = capsys.readouterr().out
        assert f"dashboard: http://127.0.0.1:{port}/t/ " in shown
        assert f"ssh -L {port}:127.0.0.1:{port} " in shown
    loopback.listen_on_loopback(port, "--dashboard", wait_sec=0).close()


def test_tokens_are_long_and_random_unless_derived():
    tokens = {loopback.make_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 20
    assert loopback.make_token("job") == loopback.make_token("job") != loopback.make_token("bob")
    assert "job" not in loopback.make_token("job")


@pytest.mark.serial  # beside other tests, its priority leaves it no core
def test_process_is_light_and_ends_with_its_pipe(folder):
    listener = loopback.listen_on_loopback(0, "--dashboard")
    port = listener.getsockname()[1]
    process = live_page._start_process(folder, listener, TOKEN)
    listener.close()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("GET", f"/{TOKEN}/figures/learning.svg")
    assert b"<svg" in connection.getresponse().read()
    assert TOKEN not in Path(f"/proc/{process.pid}/cmdline").read_text()
    assert not re.search(r"libtorch|libmpi", Path(f"/proc/{process.pid}/maps").read_text())
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
    group = Path(f"/proc/{process.pid}/autogroup")
    assert not group.exists() or group.read_text().endswith(" nice 19\n")
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(ignored)
    connection.request("GET", f"/{TOKEN}/state.json")
    assert connection.getresponse().status == 200
    process.stdin.close()
    assert process.wait(5) == 0
    loopback.listen_on_loopback(port, "--dashboard", wait_sec=0).close()


def test_page_closes_even_a_stopped_process(folder, capsys):
    page = live_page.make_page(TrainingConfig(run_dir=str(folder), dashboard=0))
    page.serve(folder)
    assert re.search(r"dashboard: http://127\.0\.0\.1:\d+/", capsys.readouterr().out)
    page._process.send_signal(signal.SIGSTOP)
    pid = page._process.pid
    page.close()
    assert not Path(f"/proc/{pid}").exists()
    page.close()


@pytest.mark.parametrize(
    ("writer", "lost", "serving"),
    [
        pytest.param(1, [], 0, id="rank 0 stands by on the host where the files are written"),
        pytest.param(1, [0], 1, id="rank 0 is lost"),
        pytest.param(2, [], 2, id="rank 0 stands by on a host that need not see the files"),
    ],
)
def test_the_rank_that_writes_the_files_serves_the_page(
    monkeypatch, tmp_path, writer, lost, serving
):
    infos = [RankInfo(n, n, "a", "cpu", "cpu", "", 0, "2.13", node=n // 2) for n in range(3)]
    serve = {}
    monkeypatch.setattr(live_page.ServedPage, "serve", lambda page, _: serve.update({page: True}))
    monkeypatch.setattr(live_page.ServedPage, "close", lambda page: serve.pop(page, None))
    pages = []
    for info in infos:
        page = live_page.ServedPage(0)
        page._own, page._server = info, infos[0]
        pages.append(page)
    pages[0].serve(tmp_path)
    for _ in range(2):
        for rank, page in enumerate(pages):
            if rank not in lost:
                page.follow(tmp_path, infos[writer], lost)
    alive = [page for page in serve if pages.index(page) not in lost]
    assert [pages.index(page) for page in alive] == [serving]


def test_without_matplotlib_and_without_a_folder(monkeypatch):
    monkeypatch.setattr(live_page, "find_spec", lambda name: None)
    page = live_page.make_page(TrainingConfig(run_dir="run", dashboard=0))
    with pytest.raises(UserError, match=r'pip install "kaitian-mpi\[report\]"'):
        page._listen()
    with pytest.raises(UserError, match=r"--dashboard needs --run-dir"):
        TrainingConfig(dashboard=0)
    assert isinstance(live_page.make_page(TrainingConfig()), live_page.NoPage)


@pytest.mark.parametrize("supervised", [True, False])
def test_a_port_in_use_ends_a_job_unless_it_was_restarted(monkeypatch, supervised):
    monkeypatch.setattr(live_page, "SUPERVISED", "PATH" if supervised else "NO_SUCH")
    with loopback.listen_on_loopback(0, "--dashboard") as taken:
        port = taken.getsockname()[1]
        page = live_page.make_page(TrainingConfig(run_dir="run", dashboard=port))
        if not supervised:
            with pytest.raises(UserError, match=f"--dashboard {port}: Address already in use"):
                page._listen()
            return
        with page._listen() as listener:
            assert listener.getsockname()[1] != port


def test_report_serves_a_run_until_ctrl_c(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "kaitian_mpi.cli.report", folder, "--serve", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    url = re.search(r"http://\S+", process.stdout.readline())[0]
    with urllib.request.urlopen(f"{url}figures/learning.svg") as answer:
        assert b"EMULATED" in answer.read()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[1] == ""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", "0", "--text"], "--serve: needed one RUN_DIR and none of -o"),
        (["run", "--serve", "0"], "--serve: needed one RUN_DIR"),
        (["--serve", "65536"], "--serve: found 65536, needed a port from 0 to 65535"),
    ],
)
def test_mistakes_with_serve_are_one_line(folder, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["kaitian-report", str(folder), *arguments])
    with pytest.raises(SystemExit) as end:
        report.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
