"""Fetching images: what is refused, and that no server, however hostile, gets more than a refusal out of it.

The servers are real, on this machine. Where one stands for a server of the internet, `Internet` takes connections to
its public address there.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.addresses import is_private, is_public
from server.fetch import FetchPolicy, MediaFetcher, Resolver, is_fetched
from server.media import MediaError

Answer = Callable[[bytes], AsyncGenerator[bytes, None]]  # the head of a request -> what is sent back, piece by piece

HOST, ADDRESS = "pictures.test", "93.184.216.34"
OTHER_HOST, OTHER_ADDRESS = "other.test", "93.184.216.35"
URL = f"http://{HOST}/cat.png"
PICTURE = bytes(range(256)) * 40
# Made for these tests: a certificate for pictures.test, signed by itself.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgSrrs9yobJAe4JLId
bCi4yoCrSjXG66HudoM5pmAP7OmhRANCAAQqA/9ggQYh+/dtpqQFgnkkZcUuxaoD
XGeVTpr5n/NbRPS9gq28A+hBbP+t1Hr46ndGn/RYjs1KIxBcHNtHrVzu
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBbTCCAROgAwIBAgIBATAKBggqhkjOPQQDAjAYMRYwFAYDVQQDDA1waWN0dXJl
cy50ZXN0MCAXDTIwMDEwMTAwMDAwMFoYDzIxMjAwMTAxMDAwMDAwWjAYMRYwFAYD
VQQDDA1waWN0dXJlcy50ZXN0MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEKgP/
YIEGIfv3baakBYJ5JGXFLsWqA1xnlU6a+Z/zW0T0vYKtvAPoQWz/rdR6+Op3Rp/0
WI7NSiMQXBzbR61c7qNMMEowGAYDVR0RBBEwD4INcGljdHVyZXMudGVzdDAPBgNV
HRMBAf8EBTADAQH/MB0GA1UdDgQWBBTbBlJG/3OlDEMvhzZBydEIEuXzPTAKBggq
hkjOPQQDAgNIADBFAiEA/3LMJqjmUFu4+HIK+OxA4wtHERHSd7czp+wMHYOW7/sC
IAY7Rzn1AxWvqEobzq0dxCOw5FbDNOSi9sAGeVg+xPkX
-----END CERTIFICATE-----
"""


class Server:
    """A server of this machine that answers every request in the same way."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.port = 0
        self.requests: list[bytes] = []
        self.sent = 0
        self.sni: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self, certificate: Path | None = None) -> AsyncIterator[Server]:
        """Serve while the context lasts; with a certificate, TLS."""
        context = None
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            context.sni_callback = lambda _, name, __: self.sni.append(name)
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # closed connections go away in the loop's next turn

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(request)
            async for piece in self._answer(request):
                writer.write(piece)
                await writer.drain()
                self.sent += len(piece)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has heard enough
        finally:
            writer.close()


class Internet(httpx.AsyncBaseTransport):
    """Opens the connections for real, but to local servers in place of public addresses; others must not be asked."""

    def __init__(self, places: dict[str, int]) -> None:
        self._places = places
        self._real = httpx.AsyncHTTPTransport(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), trust_env=False)
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        assert request.url.host in self._places, f"a connection to {request.url.host}"
        request.url = request.url.copy_with(host="127.0.0.1", port=self._places[request.url.host])
        return await self._real.handle_async_request(request)

    async def aclose(self) -> None:
        await self._real.aclose()


def names(**answers: Sequence[str]) -> Resolver:
    """A resolver that knows these names ('_' for '.')."""

    async def resolve(name: str, port: int) -> Sequence[str]:
        if name.replace(".", "_") not in answers:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return answers[name.replace(".", "_")]

    return resolve


KNOWN = names(pictures_test=[ADDRESS], other_test=[OTHER_ADDRESS])


async def fetch(
    url: str, internet: Internet | None = None, resolver: Resolver = KNOWN, **policy: Any
) -> bytes | MediaError:
    """What the fetcher says to a URL: bytes, or the error. Without `internet`, no connection may be opened."""
    fetcher = MediaFetcher(FetchPolicy(**policy), resolver=resolver, transport=internet or Internet({}))
    try:
        return await fetcher.fetch(url)
    except MediaError as error:
        return error
    finally:
        await fetcher.aclose()


def refusal(url: str, **options: Any) -> str:
    """The message that refuses a URL before any connection."""
    outcome = asyncio.run(fetch(url, **options))
    assert isinstance(outcome, MediaError), outcome
    return str(outcome)


def get(answer: Answer, url: str = URL, **policy: Any) -> tuple[bytes | MediaError, Server]:
    """Fetch from a server that answers so, under both host names."""

    async def run() -> tuple[bytes | MediaError, Server]:
        async with Server(answer).running() as server:
            internet = Internet({ADDRESS: server.port, OTHER_ADDRESS: server.port})
            return await fetch(url, internet, **policy), server

    return asyncio.run(run())


def plain(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> Answer:
    """An answer with Content-Length, by default the true one."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]

    async def answer(_: bytes) -> AsyncGenerator[bytes, None]:
        yield "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    return answer


def redirect(*locations: str, status: str = "302 Found") -> Answer:
    """Redirects to the locations one after the other, then the picture."""
    left = list(locations)

    async def answer(request: bytes) -> AsyncGenerator[bytes, None]:
        if not left:
            reply = plain(PICTURE)
        else:
            reply = plain(b"moved", f"Location: {left.pop(0)}", "Set-Cookie: a=b", status=status)
        async for piece in reply(request):
            yield piece

    return answer


# What comes back


def test_bytes_of_a_url_and_nothing_of_ours_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    outcome, server = get(plain(PICTURE), f"  http://{HOST.upper()}./a%20b.png?c=d#e\n")
    assert outcome == PICTURE
    head, *lines = server.requests[0].decode().strip().split("\r\n")
    assert head == "GET /a%20b.png?c=d HTTP/1.1"
    sent = dict(line.split(": ", 1) for line in lines)
    assert sent.pop("Host") == HOST
    assert sent.pop("Accept").startswith("image/png")
    assert sent == {"User-Agent": "vl2", "Accept-Encoding": "identity", "Connection": "close"}


def test_body_in_chunks_and_body_until_close() -> None:
    async def chunked(_: bytes) -> AsyncGenerator[bytes, None]:
        yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        for value in PICTURE[:1000]:
            yield b"1\r\n" + bytes([value]) + b"\r\n"
        yield b"0\r\n\r\n"

    async def until_close(_: bytes) -> AsyncGenerator[bytes, None]:
        yield b"HTTP/1.0 200 OK\r\n\r\n" + PICTURE

    assert get(chunked)[0] == PICTURE[:1000]
    assert get(until_close)[0] == PICTURE
    assert get(plain(b""))[0] == b""


def test_body_of_exactly_the_limit() -> None:
    assert get(plain(PICTURE), max_bytes=len(PICTURE))[0] == PICTURE


@pytest.mark.parametrize("status", ["404 Not Found", "500 Oops", "204 No Content", "304 Not Modified", "302 Found"])
def test_anything_but_200_is_named(status: str) -> None:
    message = str(get(plain(b"", status=status))[0])
    assert f"answered with status {status[:3]}" in message
    assert HOST in message


# Where to


@pytest.mark.parametrize("text", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(text: str) -> None:
    address = ip_address(text)
    assert is_public(address)
    assert not is_private(address)
    assert FetchPolicy().allows_address(address)


PRIVATE = [
    "10.1.2.3",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.0.1",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::10.0.0.1",
    "64:ff9b::127.0.0.1",
    "fc00::1",
    "fd12:3456::1",
    "2001:db8::1",
    "3fff::1",
]
NEVER = [
    "0.0.0.0",
    "0.1.2.3",
    "169.254.169.254",
    "::ffff:169.254.169.254",
    "64:ff9b::169.254.169.254",
    "64:ff9b:1::a00:1",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "fd00:ec2::254",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::127.0.0.1",
    "::10.0.0.1",
    "fe80::1",
    "fe80::1%1",
    "fec0::1",
    "ff02::1",
    "2002:7f00:1::1",
    "2002:a00:1::",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
]


@pytest.mark.parametrize("text", PRIVATE)
def test_private_addresses_are_for_closed_networks(text: str) -> None:
    address = ip_address(text)
    assert not is_public(address)
    assert is_private(address)
    assert not FetchPolicy().allows_address(address)
    assert FetchPolicy(allow_private=True).allows_address(address)


@pytest.mark.parametrize("text", NEVER)
def test_addresses_that_are_never_for_pictures(text: str) -> None:
    address = ip_address(text)
    assert not is_public(address)
    assert not FetchPolicy(allow_private=True).allows_address(address)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "[::1]",
        "169.254.169.254",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "10.0.0.1",
        "0.0.0.0",
        "0x7f000001",
        "2130706433",
        "017700000001",
        "0177.0.0.1",
        "127.1",
        "127.0.1",
        "0x7f.1",
        "0x7f.0.0.1",
        "127.0.0.1.",
        "1.2.3.256",
        "127。0。0。1",
        "①②⑦.0.0.1",
        "127.0.0.0x1",
        "localhost",
        "LOCALHOST.",
        "",
        "a..b",
        ".a",
        "%6c%6fcalhost",
        "a b",
        "a_" * 40,
        "a." * 130,
        "[::1",
        "[fe80::1%25eth0]",
    ],
)
def test_hosts_that_are_refused_without_a_connection(host: str) -> None:
    # `Internet({})` fails the test if anything connects; the odd spellings do not even reach the resolver.
    resolver = names(localhost=["127.0.0.1", "::1"])
    for port in ("", ":80"):
        message = refusal(f"http://{host}{port}/latest", resolver=resolver)
        if host.lower().startswith("localhost"):
            assert "127" not in message


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000/health",
        "http://8.8.8.8:22/",
        "https://8.8.8.8:80443/",
        "http://8.8.8.8:0/",
        "ftp://8.8.8.8/a.png",
        "gopher://8.8.8.8/_x",
        "javascript:alert(1)",
        "http:/8.8.8.8/",
        "http:8.8.8.8",
        "//8.8.8.8/a.png",
        "http://user@pictures.test/",
        "http://user:password@pictures.test/",
        "http://8.8.8.8\\@127.0.0.1/",
        "http://pictures.test\r\nX: y/",
        "http://pictures.test/\0",
        "http://",
        "http://[",
        "",
        "http://pictures.test/" + "a" * 70_000,
    ],
)
def test_urls_that_are_refused_without_a_connection(url: str) -> None:
    refusal(url)


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=100)
def test_no_text_does_more_than_be_refused(text: str) -> None:
    async def run() -> None:
        nobody = names()
        fetcher = MediaFetcher(FetchPolicy(), resolver=nobody, transport=Internet({}))
        for url in (text, f"http://{text}", f"http://a.test{text}", f"file://{text}", f"http://[{text}]/"):
            with pytest.raises(MediaError):
                await fetcher.fetch(url)
        await fetcher.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("addresses", [["10.0.0.7"], [ADDRESS, "10.0.0.7"], ["10.0.0.7", ADDRESS], ["fe80::1%2"], []])
def test_one_address_that_is_not_public_condemns_a_name_and_stays_secret(addresses: list[str]) -> None:
    message = refusal(URL, resolver=names(pictures_test=addresses))
    assert "10.0.0.7" not in message
    # The same words as for a name that does not exist: names of the inside cannot be guessed one by one.
    assert message == refusal(URL, resolver=names())


def test_a_name_that_changes_its_mind_is_looked_up_once() -> None:
    answers = [[ADDRESS], ["127.0.0.1"]]
    asked = []

    async def rebinding(name: str, port: int) -> list[str]:
        asked.append(name)
        return answers[min(len(asked), len(answers)) - 1]

    async def run(answer: Answer) -> tuple[bytes | MediaError, list[str]]:
        async with Server(answer).running() as server:
            internet = Internet({ADDRESS: server.port})
            return await fetch(URL, internet, rebinding), internet.asked

    assert asyncio.run(run(plain(PICTURE))) == (PICTURE, [ADDRESS])
    assert asked == [HOST]
    # A redirect looks the name up again, and checks again.
    asked.clear()
    outcome, connected = asyncio.run(run(redirect("/again")))
    assert isinstance(outcome, MediaError)
    assert asked == [HOST, HOST]
    assert connected == [ADDRESS]


def test_the_connection_goes_to_the_checked_address_not_to_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing replaced but the resolver: nobody else asks for the name."""

    async def run() -> bytes:
        async with Server(plain(PICTURE)).running() as server:
            policy = FetchPolicy(allow_private=True, allowed_ports=frozenset({server.port}))
            fetcher = MediaFetcher(policy, resolver=names(pictures_test=["127.0.0.1"]))
            try:
                data = await fetcher.fetch(f"http://{HOST}:{server.port}/")
            finally:
                await fetcher.aclose()
            assert f"Host: {HOST}:{server.port}\r\n".encode() in server.requests[0]
            return data

    looked_up: list[Any] = []
    real = socket.getaddrinfo

    def watched(host: Any, *rest: Any, **more: Any) -> Any:
        looked_up.append(host)
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", watched)
    assert asyncio.run(run()) == PICTURE
    assert HOST not in looked_up


def test_the_system_resolver() -> None:
    async def run(**policy: Any) -> bytes | MediaError:
        async with Server(plain(PICTURE)).running() as server:
            fetcher = MediaFetcher(FetchPolicy(allowed_ports=frozenset({server.port}), **policy))
            try:
                return await fetcher.fetch(f"http://localhost:{server.port}/")
            except MediaError as error:
                assert not server.requests
                return error
            finally:
                await fetcher.aclose()

    assert asyncio.run(run(allow_private=True)) == PICTURE
    assert isinstance(asyncio.run(run()), MediaError)


def test_the_next_address_is_tried_when_one_takes_no_connection() -> None:
    async def run(addresses: list[str]) -> bytes | MediaError:
        async with Server(plain(PICTURE)).running() as server:
            with socket.create_server(("127.0.0.1", 0)) as closed:
                nobody = closed.getsockname()[1]
            internet = Internet({ADDRESS: nobody, OTHER_ADDRESS: server.port})
            return await fetch(URL, internet, names(pictures_test=addresses))

    assert asyncio.run(run([ADDRESS, OTHER_ADDRESS])) == PICTURE
    assert "does not accept connections" in str(asyncio.run(run([ADDRESS])))


def test_only_allowed_domains_when_some_are_named() -> None:
    policy = FetchPolicy(allowed_domains=("Pictures.test", ".example.com", "bücher.example"))
    allowed = ("pictures.test", "example.com", "a.example.com", "a.b.example.com", "xn--bcher-kva.example")
    assert all(map(policy.allows_domain, allowed))
    others = ("a.pictures.test", "pictures.test.evil.com", "badexample.com", "example.com.evil", "com", "8.8.8.8")
    assert not any(map(policy.allows_domain, others))
    assert get(plain(PICTURE), allowed_domains=(HOST,))[0] == PICTURE
    assert "allows certain hosts only" in refusal(f"http://{OTHER_HOST}/", allowed_domains=(HOST,))
    assert "allows certain hosts only" in refusal("http://8.8.8.8/", allowed_domains=(HOST,))
    # An allowed name is no way around the check of its address.
    refusal(URL, allowed_domains=(HOST,), resolver=names(pictures_test=["10.0.0.1"]))
    # Redirects pass the same check.
    outcome, server = get(redirect(f"http://{OTHER_HOST}/"), allowed_domains=(HOST,))
    assert "allows certain hosts only" in str(outcome)
    assert len(server.requests) == 1


def test_switched_off() -> None:
    assert "send the image itself" in refusal(URL, allow_urls=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"allowed_domains": ("*.example.com",)},
        {"allowed_domains": ("https://example.com",)},
        {"allowed_domains": ("example.com/path",)},
        {"allowed_domains": ("example.com?x",)},
        {"allowed_domains": ("example.com:8080",)},
        {"allowed_domains": ("me@example.com",)},
        {"allowed_domains": ("",)},
        {"allowed_domains": (".",)},
        {"allowed_domains": ("127.1",)},
        {"allowed_path": Path("/no/such/folder")},
        {"allowed_ports": frozenset({0})},
        {"max_bytes": 0},
        {"max_redirects": -1},
        {"connect_timeout_s": 0.0},
        {"total_timeout_s": -1.0},
    ],
)
def test_a_policy_that_cannot_be_meant(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"media|max_bytes"):
        FetchPolicy(**wrong)


# Redirects


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_redirects_are_followed_without_cookies(status: str) -> None:
    outcome, server = get(redirect("b/c.png", f"//{OTHER_HOST}/d", "/e?f", status=status), f"http://{HOST}/a/")
    assert outcome == PICTURE
    heads = [request.split(b"\r\n")[0] for request in server.requests]
    assert heads == [f"GET {path} HTTP/1.1".encode() for path in ("/a/", "/a/b/c.png", "/d", "/e?f")]
    assert [OTHER_HOST.encode() in request for request in server.requests] == [False, False, True, True]
    everything = b"".join(server.requests).lower()
    assert b"cookie" not in everything
    assert b"referer" not in everything


def test_redirects_end() -> None:
    outcome, server = get(redirect(*["/again"] * 4))
    assert "redirects more than 3 times" in str(outcome)
    assert len(server.requests) == 4
    outcome, server = get(redirect("/again"), max_redirects=0)
    assert "redirects more than 0 times" in str(outcome)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:22/",
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://169.254.169.254/latest/meta-data/",
        "http://0x7f000001/",
        "http://2130706433/",
        "http://inside.test/",
        "http://pictures.test:8080/",
        "http://user:password@pictures.test/",
        "file:///etc/hostname",
        "/\\127.0.0.1:22/\x01",
        "data:image/png;base64,AAAA",
        "ftp://pictures.test/",
        "http://[/",
    ],
)
def test_redirects_inwards_are_not_followed(location: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with Server(redirect(location)).running() as server:
            internet = Internet({ADDRESS: server.port})
            resolver = names(pictures_test=[ADDRESS], inside_test=["192.168.0.9"])
            outcome = await fetch(URL, internet, resolver, allowed_path=tmp_path)
            assert isinstance(outcome, MediaError)
            assert "192.168" not in str(outcome)
            assert internet.asked == [ADDRESS]
            assert len(server.requests) == 1

    asyncio.run(run())


# TLS


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "certificate.pem"
    path.write_text(CERTIFICATE)
    return path


def get_securely(url: str, answer: Answer, certificate: Path, *, trusted: bool = True) -> tuple[Any, Server]:
    async def run() -> tuple[Any, Server]:
        context = ssl.create_default_context(cafile=str(certificate) if trusted else None)
        async with Server(answer).running(certificate) as server:
            addresses = names(pictures_test=["127.0.0.1"], other_test=["127.0.0.1"])
            policy = FetchPolicy(allow_private=True, allowed_ports=frozenset({server.port, 80}))
            fetcher = MediaFetcher(policy, resolver=addresses, ssl_context=context)
            try:
                return await fetcher.fetch(url.format(server.port)), server
            except MediaError as error:
                return error, server
            finally:
                await fetcher.aclose()

    return asyncio.run(run())


def test_tls_goes_by_the_name(certificate: Path) -> None:
    outcome, server = get_securely(f"https://{HOST}:{{}}/", plain(PICTURE), certificate)
    assert outcome == PICTURE
    assert server.sni == [HOST]


@pytest.mark.parametrize(("host", "trusted"), [(HOST, False), (OTHER_HOST, True), ("127.0.0.1", True)])
def test_certificates_are_checked(host: str, trusted: bool, certificate: Path) -> None:
    outcome, server = get_securely(f"https://{host}:{{}}/", plain(PICTURE), certificate, trusted=trusted)
    assert "cannot be trusted" in str(outcome)
    assert not server.requests


def test_https_is_not_given_up_for_http(certificate: Path) -> None:
    outcome, server = get_securely(f"https://{HOST}:{{}}/", redirect(f"http://{HOST}/"), certificate)
    assert "from https to http" in str(outcome)
    assert len(server.requests) == 1


# Hostile servers


async def stall(_: bytes) -> AsyncGenerator[bytes, None]:
    await asyncio.Event().wait()
    yield b""


async def stall_in_body(_: bytes) -> AsyncGenerator[bytes, None]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"
    await asyncio.Event().wait()


async def drip(_: bytes) -> AsyncGenerator[bytes, None]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n"
    while True:
        yield b"x"
        await asyncio.sleep(0.01)


async def drip_headers(_: bytes) -> AsyncGenerator[bytes, None]:
    yield b"HTTP/1.1 200 OK\r\n"
    while True:
        yield b"X: y\r\n"
        await asyncio.sleep(0.01)


async def only_informational(_: bytes) -> AsyncGenerator[bytes, None]:
    while True:
        yield b"HTTP/1.1 103 Early Hints\r\n\r\n"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("answer", [stall, stall_in_body, drip, drip_headers, only_informational])
def test_slow_servers_run_into_the_time_limit(answer: Answer) -> None:
    assert "did not arrive within 0.2 seconds" in str(get(answer, total_timeout_s=0.2)[0])


def test_slow_names_and_many_slow_redirects_run_into_the_same_limit() -> None:
    async def slow(name: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return [ADDRESS]

    assert "did not arrive" in refusal(URL, resolver=slow, total_timeout_s=0.1)

    async def slow_redirect(_: bytes) -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.1)
        yield b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"

    assert "did not arrive" in str(get(slow_redirect, total_timeout_s=0.25, max_redirects=100)[0])


def test_a_connection_that_is_never_taken_runs_into_its_limit() -> None:
    class Unreachable(Internet):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            self.asked.append(request.url.host)
            await asyncio.sleep(request.extensions["timeout"]["connect"])
            raise httpx.ConnectTimeout("", request=request)

    nowhere = Unreachable({})
    resolver = names(pictures_test=[ADDRESS, OTHER_ADDRESS])
    outcome = asyncio.run(fetch(URL, nowhere, resolver, connect_timeout_s=0.02))
    assert "does not accept connections" in str(outcome)
    assert nowhere.asked == [ADDRESS, OTHER_ADDRESS]


async def endless(_: bytes) -> AsyncGenerator[bytes, None]:
    yield b"HTTP/1.1 200 OK\r\n\r\n"
    while True:
        yield bytes(10_000)


async def endless_chunks(_: bytes) -> AsyncGenerator[bytes, None]:
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"1000\r\n" + bytes(0x1000) + b"\r\n"


async def crumbs(_: bytes) -> AsyncGenerator[bytes, None]:
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"1\r\n\0\r\n" * 1000


@pytest.mark.parametrize("answer", [endless, endless_chunks])
def test_endless_bodies_are_cut_at_the_limit(answer: Answer) -> None:
    outcome, server = get(answer, max_bytes=20_000)
    assert "more bytes than the limit of 20000" in str(outcome)
    assert server.sent < 30_000_000  # what sockets buffer on the way, and no more


def test_a_body_in_crumbs_is_refused_before_it_costs_much_time() -> None:
    outcome, server = get(crumbs)
    assert "pieces too small" in str(outcome)
    assert server.sent < 30_000_000


def test_a_large_content_length_is_refused_unread() -> None:
    outcome, _ = get(plain(b"", length=10**15))
    assert "more bytes than the limit" in str(outcome)


@pytest.mark.parametrize("length", [len(PICTURE) + 1, 10**6])
def test_a_content_length_that_promises_too_much(length: int) -> None:
    assert "broke before the image was complete" in str(get(plain(PICTURE, length=length))[0])


def test_a_content_length_that_promises_too_little() -> None:
    assert get(plain(PICTURE, length=100), max_bytes=200)[0] == PICTURE[:100]


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate", "br", "zstd", "identity, gzip", "GZIP"])
def test_compressed_bodies_are_refused(encoding: str) -> None:
    bomb = gzip.compress(bytes(10_000_000))
    outcome, _ = get(plain(bomb, f"Content-Encoding: {encoding}"))
    assert "encoding" in str(outcome)
    assert get(plain(PICTURE, "Content-Encoding: identity"))[0] == PICTURE


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\0" * 100,
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffffffffff\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab",
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * 300_000,
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
        b"HTTP/2 200 OK\r\n\r\n",
    ],
)
def test_broken_http_is_refused(reply: bytes) -> None:
    async def answer(_: bytes) -> AsyncGenerator[bytes, None]:
        yield reply

    outcome, _ = get(answer, total_timeout_s=2.0)
    assert isinstance(outcome, MediaError)
    assert HOST in str(outcome)


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """pictures/: the allowed one. secret.png: beside it."""
    pictures = tmp_path / "pictures"
    (pictures / "sub folder").mkdir(parents=True)
    (pictures / "sub folder" / "ü#?.png").write_bytes(PICTURE)
    (pictures / "cat.png").write_bytes(PICTURE)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "pictures2").mkdir()
    (tmp_path / "pictures2" / "cat.png").write_bytes(b"secret")
    (pictures / "inside").symlink_to("sub folder")
    (pictures / "outside.png").symlink_to(tmp_path / "secret.png")
    (pictures / "up").symlink_to("..")
    (pictures / "loop").symlink_to("loop")
    os.mkfifo(pictures / "pipe")
    return pictures


@pytest.mark.parametrize("url", ["file:///etc/hostname", "/etc/hostname", "FILE:/etc/hostname", "file://host/etc/x"])
def test_no_files_unless_a_folder_is_allowed(url: str, folder: Path) -> None:
    assert is_fetched(url)
    assert "opens no files" in refusal(url)
    message = refusal(url, allowed_path=folder)
    assert "not within the directory" in message or "must have the form" in message


def test_files_below_the_allowed_folder(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    urls = [
        f"{folder}/cat.png",
        f"file://{folder}/cat.png",
        f"file://localhost{folder}/./cat.png",
        f"{folder}/sub folder/ü#?.png",
        f"file:{folder}/sub%20folder/%C3%BC%23%3f.png",
        f"{folder}/inside/ü#?.png",
    ]
    for url in urls:
        assert asyncio.run(fetch(url, allowed_path=folder, max_bytes=len(PICTURE))) == PICTURE
    # Files are no URLs: switching those off leaves these.
    assert asyncio.run(fetch(urls[0], allowed_path=folder, allow_urls=False)) == PICTURE
    # An allowed folder that is a link itself goes by both its names.
    for url in (f"{link}/cat.png", f"{folder}/cat.png"):
        assert asyncio.run(fetch(url, allowed_path=link)) == PICTURE


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../secret.png", "not within"),
        ("../pictures2/cat.png", "not within"),
        ("sub folder/../cat.png", "not within"),
        ("%2e%2e/secret.png", "not within"),
        ("outside.png", "not within"),
        ("up/secret.png", "not within"),
        ("up/nothing.png", "not within"),
        ("up/pictures/cat.png", None),
        ("", "not a regular file"),
        ("sub folder", "not a regular file"),
        ("pipe", "not a regular file"),
        ("nothing.png", "no file"),
        ("cat.png/x", "no file"),
        ("loop", "cannot be read"),
        ("a" * 300, "cannot be read"),
        ("%00", "zero byte"),
    ],
)
def test_ways_out_of_the_allowed_folder(path: str, reason: str | None, folder: Path) -> None:
    outcome = asyncio.run(fetch(f"file://{folder}/{path}", allowed_path=folder))
    if reason is None:
        assert outcome == PICTURE
    else:
        assert isinstance(outcome, MediaError)
        assert reason in str(outcome)


def test_a_link_that_appears_after_the_check_is_not_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.realpath", lambda path: str(path))  # as if it had been a file when it was checked
    for path in ("outside.png", "up/secret.png"):
        outcome = asyncio.run(fetch(f"{folder}/{path}", allowed_path=folder))
        assert isinstance(outcome, MediaError)


def test_files_beside_the_folder_and_files_too_large(folder: Path) -> None:
    assert "not within" in refusal(f"{folder}2/cat.png", allowed_path=folder)
    assert "not within" in refusal(f"/{folder}/cat.png", allowed_path=folder)
    assert "limit of 100" in refusal(f"{folder}/cat.png", allowed_path=folder, max_bytes=100)
    assert "must have the form" in refusal(f"file://elsewhere{folder}/cat.png", allowed_path=folder)
    assert "must have the form" in refusal(f"file://{folder}/cat.png?x", allowed_path=folder)
    assert "malformed" in refusal("file://[/cat.png", allowed_path=folder)


def test_what_is_for_the_fetcher() -> None:
    for url in ("http://a/", " HTTPS://a/", "file:///a", "File:/a", "/a/b.png", "//a/b"):
        assert is_fetched(url)
    for url in ("data:image/png;base64,AAAA", "/9j/4AAQSkZJRgABAQ", "iVBORw0KGgo", "ftp://a/", "a.png", "", "httpx:a"):
        assert not is_fetched(url)
