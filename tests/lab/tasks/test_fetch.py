"""Downloads from a loopback server that cuts connections, ignores ranges, serves wrong bytes, or has nothing."""

import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hemiola.errors import InputError
from hemiola.lab.tasks import fetch
from hemiola.lab.tasks.fetch import fetch_set, list_sets
from hemiola.lab.tasks.files import SETS, DataSet, Download

BODY = bytes(range(256)) * 2000  # 512,000 bytes


def checksum(body, algorithm="sha256"):
    return f"{algorithm}:{hashlib.new(algorithm, body).hexdigest()}"


class Server(ThreadingHTTPServer):
    """Serves ``files``; ``cut_after`` limits the bytes of each of the first ``cuts`` answers."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.ranges, self.cuts, self.cut_after, self.errors = {}, True, 0, 0, 0
        self.requests = []

    def url(self, name):
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        wanted = self.headers.get("Range")
        server.requests.append((self.path, wanted))
        body = server.files.get(self.path[1:])
        if body is None:
            return self.send_error(404)
        if server.errors:
            server.errors -= 1
            return self.send_error(503)
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranges else 0
        if first >= len(body):
            return self.send_error(416)
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - first))
        self.end_headers()
        send = body[first:]
        if server.cuts:
            server.cuts -= 1
            send = send[: server.cut_after]
        self.wfile.write(send)
        return None

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def add_set(monkeypatch):
    def add(*downloads, by_hand=""):
        files = [d.path for d in downloads if d.path] + [place for d in downloads for _, place in d.members]
        data_set = DataSet("toy", "A toy", tuple(files or ["toy/x"]), tuple(downloads), by_hand)
        monkeypatch.setitem(SETS, "toy", data_set)

    return add


def error_of(root):
    with pytest.raises(InputError) as caught:
        fetch_set("toy", root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def everything_in(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_file_is_fetched_checked_and_put_in_place(server, add_set, tmp_path):
    server.files["a"] = BODY
    add_set(Download((server.url("a"),), checksum(BODY, "md5"), len(BODY), path="deep/er/a.bin"))
    seen = []
    root = tmp_path / "new"
    assert fetch_set("toy", root, lambda *step: seen.append(step)) == [root / "deep/er/a.bin"]
    assert (root / "deep/er/a.bin").read_bytes() == BODY
    assert everything_in(root) == ["deep/er/a.bin"]
    assert seen[0] == ("a", 0, len(BODY))
    assert seen[-1] == ("a", len(BODY), len(BODY))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_what_is_there_is_not_fetched_again(server, add_set, tmp_path):
    server.files |= {"a": BODY, "b": BODY}
    add_set(
        Download((server.url("a"),), checksum(BODY), 0, path="a"),
        Download((server.url("b"),), checksum(BODY), 0, path="b"),
    )
    (tmp_path / "a").write_bytes(b"mine")
    assert fetch_set("toy", tmp_path) == [tmp_path / "b"]
    assert (tmp_path / "a").read_bytes() == b"mine"
    assert fetch_set("toy", tmp_path) == []
    assert server.requests == [("/b", None)]


def test_a_cut_connection_is_resumed_where_it_broke(server, add_set, tmp_path):
    server.files["a"], server.cuts, server.cut_after = BODY, 3, 100_000
    add_set(Download((server.url("a"),), checksum(BODY), 0, path="a"))
    fetch_set("toy", tmp_path)
    assert (tmp_path / "a").read_bytes() == BODY
    assert [wanted for _, wanted in server.requests] == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]


def test_a_server_that_ignores_ranges_is_read_from_the_start(server, add_set, tmp_path):
    server.files["a"], server.cuts, server.cut_after, server.ranges = BODY, 2, 100_000, False
    add_set(Download((server.url("a"),), checksum(BODY), 0, path="a"))
    fetch_set("toy", tmp_path)
    assert (tmp_path / "a").read_bytes() == BODY


def test_after_too_many_cuts_the_part_stays_and_the_next_call_goes_on(server, add_set, tmp_path):
    server.files["a"], server.cuts, server.cut_after = BODY, fetch.ATTEMPTS, 10_000
    add_set(Download((server.url("a"),), checksum(BODY), 0, path="a"))
    assert "the connection was cut (tried 5 times)" in error_of(tmp_path)
    assert everything_in(tmp_path) == ["a.part"]
    server.requests.clear()
    fetch_set("toy", tmp_path)
    assert server.requests == [("/a", "bytes=50000-")]
    assert (tmp_path / "a").read_bytes() == BODY
    assert everything_in(tmp_path) == ["a"]


def test_a_whole_part_needs_no_more_bytes(server, add_set, tmp_path):
    server.files["a"] = BODY
    (tmp_path / "a.part").write_bytes(BODY)
    add_set(Download((server.url("a"),), checksum(BODY), 0, path="a"))
    fetch_set("toy", tmp_path)
    assert (tmp_path / "a").read_bytes() == BODY


@pytest.mark.parametrize("foreign", [b"x" * 1000, b"x" * 600_000])
def test_a_part_of_another_file_is_thrown_away(server, add_set, tmp_path, foreign):
    server.files["a"] = BODY
    (tmp_path / "a.part").write_bytes(foreign)
    add_set(Download((server.url("a"),), checksum(BODY), 0, path="a"))
    fetch_set("toy", tmp_path)
    assert (tmp_path / "a").read_bytes() == BODY


def test_wrong_bytes_are_not_kept(server, add_set, tmp_path):
    server.files["a"] = BODY[:-1] + b"!"
    add_set(Download((server.url("a"),), checksum(BODY), 0, path="a"))
    message = error_of(tmp_path)
    assert message.startswith("could not fetch data set 'toy': http://127.0.0.1")
    assert "wrong bytes: sha256 of the 512000 bytes is" in message
    assert everything_in(tmp_path) == []


def test_a_second_address_is_tried(server, add_set, tmp_path):
    server.files |= {"bad": b"no", "good": BODY}
    add_set(Download((server.url("none"), server.url("bad"), server.url("good")), checksum(BODY), 0, path="a"))
    fetch_set("toy", tmp_path)
    assert (tmp_path / "a").read_bytes() == BODY


def test_not_found_is_final_but_a_busy_server_is_asked_again(server, add_set, tmp_path):
    add_set(Download((server.url("none"),), checksum(BODY), 0, path="a"))
    assert "HTTP 404" in error_of(tmp_path)
    assert len(server.requests) == 1
    server.files["a"], server.errors = BODY, 2
    add_set(Download((server.url("a"),), checksum(BODY), 0, path="a"))
    fetch_set("toy", tmp_path)
    assert (tmp_path / "a").read_bytes() == BODY


def test_nobody_there(server, add_set, tmp_path):
    add_set(Download(("http://127.0.0.1:9/a",), checksum(BODY), 0, path="a"))
    assert "(tried 5 times)" in error_of(tmp_path)


def archive_of(kind, members):
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, body in members.items():
                archive.writestr(name, body)
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for name, body in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_only_the_wanted_members_are_unpacked_to_places_of_our_own(server, add_set, tmp_path, kind):
    body = archive_of(kind, {"in/one": b"1", "in/two": b"22", "../escape": b"evil", "/abs": b"evil"})
    server.files[f"x.{kind}"] = body
    add_set(Download((server.url(f"x.{kind}"),), checksum(body), 0, members=(("in/one", "o/1"), ("in/two", "o/2"))))
    root = tmp_path / "root"
    assert fetch_set("toy", root) == [root / "o/1", root / "o/2"]
    assert everything_in(tmp_path) == ["root/o/1", "root/o/2"]
    assert (root / "o/2").read_bytes() == b"22"


def test_a_set_without_a_download_says_where_to_get_it(add_set, tmp_path):
    add_set(by_hand="take x from https://example.org")
    assert error_of(tmp_path) == (
        "data set 'toy' has no official direct download: take x from https://example.org, "
        f"and put them into {tmp_path} as toy/x"
    )
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/x").write_bytes(b"1")
    assert fetch_set("toy", tmp_path) == []


def test_unknown_set():
    with pytest.raises(InputError, match=r"unknown data set 'mnits'; did you mean 'mnist'\? Known: mnist, "):
        fetch_set("mnits", None)


def test_a_folder_that_cannot_be_made_is_one_line(server, add_set, tmp_path):
    (tmp_path / "file").write_text("")
    add_set(Download((server.url("a"),), checksum(BODY), 0, path="file/a"))
    assert error_of(tmp_path).startswith(f"cannot write data to {tmp_path / 'file'}")


def test_a_full_disk_is_one_line_and_keeps_what_was_fetched(server, add_set, tmp_path, monkeypatch):
    server.files["a"] = BODY
    add_set(Download((server.url("a"),), checksum(BODY), 0, path="a"))

    def full(done, total):
        if done:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "_silent", lambda name, done, total: full(done, total))
    assert error_of(tmp_path) == f"cannot write data to {tmp_path}: No space left on device"
    assert (tmp_path / "a.part").exists()


def test_listing(add_set, tmp_path):
    add_set(by_hand="x")
    records = {record.name: record for record in list_sets(tmp_path)}
    assert records["toy"].missing == ["toy/x"]
    assert not records["toy"].present
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/x").write_bytes(b"123")
    record = next(record for record in list_sets(tmp_path) if record.name == "toy")
    assert (record.present, record.missing, record.size) == (True, [], 3)
    assert not any(record.present for record in list_sets(None))


def test_every_download_serves_a_file_of_its_set():
    for data_set in SETS.values():
        served = [d.path for d in data_set.downloads if d.path]
        served += [place for d in data_set.downloads for _, place in d.members]
        assert data_set.by_hand or sorted(served) == sorted(data_set.files)
        assert all(d.checksum.split(":")[0] in ("md5", "sha256") for d in data_set.downloads)
