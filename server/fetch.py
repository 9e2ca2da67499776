"""Bytes of an image from an http(s) URL or, where allowed, from a file: safe against whoever wrote the URL.

A URL is a stranger's wish to have this machine open a connection, so what may be reached is narrow by default:

* **Where.** Only http and https, only ports 80 and 443 (or those allowed), only the allowed domains if any are named.
  Only public addresses: if one of a name's addresses is not, the name is refused. The connection goes to an address
  that was checked, never to the name: a name that changes its mind between check and connection changes nothing.
  TLS certificates and the Host header still go by the name.
* **Redirects** are followed here, a few, and each passes the same checks anew. From https to http: refused, for who
  asks for https wants the picture to come unaltered. To anything but http(s): refused.
* **How long, how much.** Connecting and the whole fetch have time limits. Content-Length is believed when it is too
  large, and never when it is small: bytes are counted as they come, and so are pieces, each of which costs time.
  Compressed bodies are refused unread.
* **What goes out.** A fixed GET: no cookies, no credentials (a URL with some is refused), no Referer; neither proxies
  nor a netrc from the environment.
* **What comes back in errors.** Never an address that a name resolved to, nor whether a private name exists.
* **allow_private**, for closed networks, admits private and loopback addresses. Link-local, multicast, unspecified and
  reserved ones and the metadata services of clouds stay refused: no picture is ever there.
* **Files** are read below one directory, if one is allowed: regular files only, ``..`` never, and symbolic links only
  where they end inside.
"""

import asyncio
import os
import re
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from server.addresses import Address, is_private, is_public
from server.media import MediaError

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]  # host, port -> addresses; OSError when there are none

MAX_THREADS = 16  # for what may hang in the system: looking up names, reading files
CHUNKS_PER_TURN = 64  # after this many pieces of a body, the event loop gets its turn
MAX_CRUMBS = 10_000  # after this many pieces, they must have had CRUMB_BYTES on average: each costs time
CRUMB_BYTES = 64

_HEADERS = {
    "User-Agent": "vl2",
    "Accept": "image/png, image/jpeg, image/webp, image/gif, image/bmp, image/tiff, */*;q=0.1",
    "Accept-Encoding": "identity",
    "Connection": "close",
}
_REDIRECTS = (301, 302, 303, 307, 308)
_WEB_SCHEMES = ("http", "https")
_FETCHED = re.compile(r"(?:https?|file):", re.IGNORECASE)
_JPEG_IN_BASE64 = "/9j/"  # looks like a path, and is how every JPEG begins in base64

_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True)
class FetchPolicy:
    """What may be fetched. The defaults are safe for a server that strangers can reach.

    Args:
        allowed_domains: if any, only these: a name exactly, or with a leading dot itself and all below it. Addresses
            must still be public.
        allow_private: also private and loopback addresses.
        allow_urls: http(s) at all. Files are up to `allowed_path` alone.
        allowed_path: the directory below which files are read, named by absolute path or file URL.
        allowed_ports: ports that URLs may name or imply.
        max_bytes: largest image file.
        connect_timeout_s: for the connection to one address, and again for its TLS handshake.
        total_timeout_s: for everything, from the look-up of the name to the last byte.
        max_redirects: redirects followed.

    Raises:
        ValueError: a value that cannot be meant, named.
    """

    allowed_domains: tuple[str, ...] = ()
    allow_private: bool = False
    allow_urls: bool = True
    allowed_path: Path | None = None
    allowed_ports: frozenset[int] = frozenset({80, 443})
    max_bytes: int = 32 << 20
    connect_timeout_s: float = 5.0
    total_timeout_s: float = 20.0
    max_redirects: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed_domains", tuple(map(_canonical_domain, self.allowed_domains)))
        if self.allowed_path is not None and not self.allowed_path.is_dir():
            raise ValueError(f"the allowed media path {self.allowed_path} is not a directory")
        if not all(0 < port < 65536 for port in self.allowed_ports):
            raise ValueError(f"the allowed media ports {sorted(self.allowed_ports)} must be 1 to 65535")
        if self.max_bytes < 1 or self.max_redirects < 0:
            raise ValueError("max_bytes must be positive and max_redirects not negative")
        if not (self.connect_timeout_s > 0 and self.total_timeout_s > 0):
            raise ValueError("media time limits must be positive")

    def allows_domain(self, name: str) -> bool:
        """Whether images may come from this host name (lower case, no trailing dot)."""
        return not self.allowed_domains or any(
            name == domain.removeprefix(".") or (domain.startswith(".") and name.endswith(domain))
            for domain in self.allowed_domains
        )

    def allows_address(self, address: Address) -> bool:
        """Whether a connection to this address may be opened."""
        return is_public(address) or (self.allow_private and is_private(address))


def is_fetched(url: str) -> bool:
    """Whether an image URL is for `MediaFetcher`: http(s), file, or an absolute path. Other forms hold the image."""
    url = url.strip()
    return _FETCHED.match(url) is not None or (url.startswith("/") and not url.startswith(_JPEG_IN_BASE64))


class MediaFetcher:
    """Fetches images under a policy. One for the whole server; how many fetches run at once is the caller's affair."""

    def __init__(
        self,
        policy: FetchPolicy,
        *,
        resolver: Resolver | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """`resolver` replaces the system's look-up of names, `transport` what opens connections (it gets URLs whose
        host is an address), `ssl_context` the default set of trusted certificate authorities.
        """
        self._policy = policy
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="fetch")
        self._resolve = resolver if resolver is not None else self._system_resolve
        # No connection is kept: one to an address under one name must not serve another name.
        self._transport = transport or httpx.AsyncHTTPTransport(
            verify=ssl_context if ssl_context is not None else True,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def aclose(self) -> None:
        """Close what is open. Running fetches fail."""
        await self._transport.aclose()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, url: str) -> bytes:
        """The bytes of the image file at a URL or path for which `is_fetched` holds. They may be no image.

        Raises:
            MediaError: the policy forbids it, or it fails; the message says why.
        """
        url = url.strip()
        limit = self._policy.total_timeout_s
        try:
            async with asyncio.timeout(limit):
                if url.startswith("/") or url[:5].lower() == "file:":
                    return await self._read_file(url)
                return await self._download(url)
        except TimeoutError as error:
            raise MediaError(f"the image did not arrive within {limit:g} seconds") from error

    async def _download(self, text: str) -> bytes:
        url = self._parse(text)
        for _ in range(self._policy.max_redirects + 1):
            response = await self._get(url)
            try:
                location = response.headers.get("location") if response.status_code in _REDIRECTS else None
                if location is None:
                    return await self._read_body(url, response)
            finally:
                await response.aclose()
            previous, url = url, self._parse(location, base=url)
            if previous.scheme == "https" and url.scheme == "http":
                raise MediaError(f"{_host(previous)!r} redirects from https to http, which is not followed")
        raise MediaError(f"the image URL redirects more than {self._policy.max_redirects} times")

    def _parse(self, text: str, base: httpx.URL | None = None) -> httpx.URL:
        """A URL that the policy allows, its host in canonical form. `base` is what a redirect is relative to."""
        try:
            url = httpx.URL(text) if base is None else base.join(text)
        except (httpx.InvalidURL, ValueError) as error:
            raise MediaError("the image URL, or one that it redirects to, is malformed") from error
        if url.scheme not in _WEB_SCHEMES:
            raise MediaError(f"images are fetched from http and https URLs only, not from {url.scheme[:32]!r} ones")
        if not self._policy.allow_urls:
            raise MediaError("this server fetches no images from URLs; send the image itself, as a data URL")
        if url.userinfo:
            raise MediaError("the image URL has a user name or password in it, which this server does not send")
        name = _canonical_host(_host(url))
        if not self._policy.allows_domain(name):
            raise MediaError(f"images are not fetched from {name!r}: this server allows certain hosts only")
        if _port(url) not in self._policy.allowed_ports:
            raise MediaError(f"images are not fetched from port {_port(url)} on this server")
        return url.copy_with(host=name)

    async def _get(self, url: httpx.URL) -> httpx.Response:
        """The response to a GET, its body unread: of the first of the host's addresses that takes the connection."""
        name = _host(url)
        addresses = await self._addresses(name, _port(url))
        limits = httpx.Timeout(self._policy.total_timeout_s, connect=self._policy.connect_timeout_s)
        failure: Exception | None = None
        for address in addresses:
            request = httpx.Request(
                "GET",
                url.copy_with(host=str(address)),
                headers={"Host": url.netloc.decode("ascii"), **_HEADERS},
                extensions={"sni_hostname": name, "timeout": limits.as_dict()},
            )
            try:
                return await self._transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if _is_tls_failure(error):
                    raise MediaError(f"{name!r} cannot be trusted: its TLS certificate or handshake failed") from error
                failure = error
            except (httpx.HTTPError, OSError) as error:
                raise MediaError(f"{name!r} did not answer with HTTP") from error
        raise MediaError(f"{name!r} does not accept connections") from failure

    async def _addresses(self, name: str, port: int) -> list[Address]:
        """Where a host is, every one of them allowed; at least one."""
        literal = _literal(name)
        if literal is not None:
            if not self._policy.allows_address(literal):
                raise MediaError(f"images are not fetched from the address {name}: it is not public")
            return [literal]
        # One message for both: whether a name exists in a private network is nobody's business.
        refusal = f"images are not fetched from {name!r}: the name does not exist or its address is not public"
        try:
            addresses = [ip_address(text) for text in await self._resolve(name, port)]
        except (OSError, UnicodeError) as error:
            raise MediaError(refusal) from error
        if not addresses or not all(map(self._policy.allows_address, addresses)):
            raise MediaError(refusal)
        return addresses

    async def _system_resolve(self, name: str, port: int) -> list[str]:
        look_up = partial(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._pool, look_up)
        return list(dict.fromkeys(str(place[0]) for *_, place in found))

    async def _read_body(self, url: httpx.URL, response: httpx.Response) -> bytes:
        name, limit = _host(url), self._policy.max_bytes
        if response.status_code != 200:
            raise MediaError(f"{name!r} answered with status {response.status_code} instead of an image")
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise MediaError(f"{name!r} sent the image in the encoding {encoding[:32]!r}, though none was asked for")
        length = response.headers.get("content-length", "")
        too_large = f"the image at {name!r} has more bytes than the limit of {limit}"
        if length.isdecimal() and int(length) > limit:
            raise MediaError(too_large)
        data = bytearray()
        chunks = 0
        try:
            async for chunk in response.aiter_raw():
                if len(data) + len(chunk) > limit:
                    raise MediaError(too_large)
                data += chunk
                chunks += 1
                if chunks > MAX_CRUMBS and len(data) < chunks * CRUMB_BYTES:
                    raise MediaError(f"{name!r} sends the image in pieces too small")
                if chunks % CHUNKS_PER_TURN == 0:
                    await asyncio.sleep(0)
        except (httpx.HTTPError, OSError) as error:
            raise MediaError(f"the connection to {name!r} broke before the image was complete") from error
        return bytes(data)

    async def _read_file(self, text: str) -> bytes:
        root = self._policy.allowed_path
        if root is None:
            raise MediaError("this server opens no files; send the image itself, as a data URL")
        path = _path(text)
        read = partial(_read_below, root, path, self._policy.max_bytes)
        return await asyncio.get_running_loop().run_in_executor(self._pool, read)


def _host(url: httpx.URL) -> str:
    """The host in ASCII; IPv6 without brackets."""
    return url.raw_host.decode("ascii")


def _port(url: httpx.URL) -> int:
    """The port of an http(s) URL, the scheme's if it names none."""
    if url.port is not None:
        return url.port
    return 443 if url.scheme == "https" else 80


def _canonical_domain(domain: str) -> str:
    """A domain as an operator writes it, in the form that hosts are compared in. Raises ValueError."""
    dot = "." if domain.startswith(".") else ""
    name = domain.removeprefix(".")
    try:
        url = httpx.URL(f"http://[{name}]/" if ":" in name else f"http://{name}/")
        if re.search(r"[/?#@]", name) is not None or url.port is not None:
            raise ValueError("more than a name")
        return dot + _canonical_host(_host(url))
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(
            f"the allowed media domain {domain!r} is not a host name; write example.com, or .example.com for that and "
            "all below it, without scheme, port, path or *"
        ) from error


def _canonical_host(host: str) -> str:
    """A name without its trailing dot, or an address. Raises MediaError on anything else, all odd spellings of
    addresses (`0x7f000001`, `2130706433`, `127.1`) included.
    """
    literal = _literal(host)
    if literal is not None:
        return str(literal)
    name = host.removesuffix(".")
    if len(name) > 253 or _NAME.fullmatch(name) is None:
        raise MediaError("the host of the image URL is not a valid name")
    if _literal(name) is not None or _NUMBER.fullmatch(name.rpartition(".")[2]) is not None:
        raise MediaError(f"the host {name!r} of the image URL is an address in a form that is not accepted")
    return name


def _literal(host: str) -> Address | None:
    """The address that a host is, if it is one."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_tls_failure(error: BaseException) -> bool:
    """Whether TLS is behind a connection error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _path(text: str) -> Path:
    """The path in a file URL, or the one that the text is."""
    if not text.startswith("/"):
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise MediaError("the file URL is malformed") from error
        if parts.netloc.lower() not in ("", "localhost") or parts.query or parts.fragment:
            raise MediaError("a file URL must have the form file:///absolute/path, with ? and # as %3F and %23")
        text = unquote(parts.path)
    if "\0" in text:
        raise MediaError("the path has a zero byte in it")
    return Path(text)


def _read_below(root: Path, path: Path, max_bytes: int) -> bytes:
    """The content of a regular file below a directory. Says nothing about what is outside, not even what exists."""
    top = Path(os.path.realpath(root))
    outside = "the path is not within the directory that this server may read"
    base = next((base for base in (root.absolute(), top) if path.is_relative_to(base)), None)
    if base is None or ".." in path.parts:
        raise MediaError(outside)
    real = Path(os.path.realpath(top / path.relative_to(base)))
    if not real.is_relative_to(top):
        raise MediaError(outside)
    try:
        with os.fdopen(_open_below(top, real.relative_to(top).parts), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise MediaError("the path is not a regular file")
            data = file.read(max_bytes + 1) if status.st_size <= max_bytes else b""
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MediaError("there is no file at the path") from error
    except IsADirectoryError as error:
        raise MediaError("the path is not a regular file") from error
    except OSError as error:
        raise MediaError("the file cannot be read") from error
    if status.st_size > max_bytes or len(data) > max_bytes:
        raise MediaError(f"the file has more bytes than the limit of {max_bytes}")
    return data


def _open_below(top: Path, parts: Sequence[str]) -> int:
    """A descriptor for reading. The parts have no links left in them; one that has become a link since is not followed.

    A pipe does not make it wait.
    """
    descriptor = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for place, part in enumerate(parts, 1):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_DIRECTORY if place < len(parts) else 0)
        try:
            inner = os.open(part, flags, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor
