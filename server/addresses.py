"""Which addresses are open to the whole internet, which to a closed network, and which hold no picture ever.

By IANA's registries of special addresses, written out: `ipaddress` knows of more, or fewer, with each Python release.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_GLOBAL_UNICAST = ip_network("2000::/3")  # all that IANA has given out of IPv6
_NAT64 = ip_network("64:ff9b::/96")  # the last 32 bits are an IPv4 address
_NOT_PUBLIC = tuple(
    ip_network(text)
    for text in (
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation, as the other two TEST-NETs
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "2001::/23",  # protocol assignments
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
)
_NEVER = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8",
        "169.254.0.0/16",  # link-local, where most clouds have their metadata
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        "100.100.100.200/32",  # metadata: Alibaba
        "168.63.129.16/32",  # the host of an Azure machine, in public clothes
        "192.0.0.192/32",  # metadata: Oracle
        "::/96",  # unspecified, and IPv4 in a form long given up; loopback is let through
        "64:ff9b:1::/48",  # NAT64 of a site: an IPv4 address is somewhere in it
        "2001::/32",  # Teredo, and
        "2002::/16",  # 6to4: tunnels to an IPv4 address
        "fd00:ec2::254/128",  # metadata: AWS
        "fd20:ce::254/128",  # metadata: Google
        "fe80::/10",  # link-local
        "fec0::/10",  # site-local
        "ff00::/8",  # multicast
    )
)


def is_public(address: Address) -> bool:
    """Whether the whole internet may reach this address."""
    address = _plain(address)
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global and not _within(address, _NOT_PUBLIC) and not _within(address, _NEVER)


def is_private(address: Address) -> bool:
    """Whether this is an address that is not public, but that a closed network may well give to a file server.

    Loopback is one. Link-local, multicast, unspecified and reserved addresses are not, nor the metadata services of
    clouds, nor tunnels that have an IPv4 address in them.
    """
    address = _plain(address)
    return not is_public(address) and (address.is_loopback or not _within(address, _NEVER))


def _plain(address: Address) -> Address:
    """The IPv4 address within an IPv6 one that is only another spelling of it, or that is reached through NAT64."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(address.packed[-4:])
    return address


def _within(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)
