//! Which process has the port that a broker is to listen on.

use std::{
    fs,
    io::ErrorKind,
    net::{IpAddr, SocketAddr, TcpListener},
};

use hostapi::Refusal;

use super::{Root, processes::processes};

/// Which process has the brokers' port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortUse {
    /// No process.
    Free,
    /// Our own broker.
    Ours,
    /// Somebody else.
    Taken(Holder),
    /// It can't be listened on for another reason.
    Unusable(String),
}

/// Who has taken a port, as far as that can be known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A process whose socket has it: its pid and name.
    Process(i32, String),
    /// The user with this uid, whose socket has it. No process was found that has the socket: it may be on its way from one process to
    /// another (unix(7), `SCM_RIGHTS`), or we may not look into that process.
    User(u32),
    /// A socket is only bound: it neither listens nor is connected.
    Unknown,
}

/// Tries to listen, for an instant, as a broker would. A process that has the port at another address does not matter.
pub fn port_use(root: &Root, endpoint: SocketAddr) -> PortUse {
    match TcpListener::bind(endpoint) {
        Ok(_) => PortUse::Free,
        Err(error) if error.kind() == ErrorKind::AddrInUse => PortUse::Taken(holder(root, endpoint)),
        // The address is on no interface, as behind NAT. Only brokers with children listen, and those report the
        // problem.
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => PortUse::Free,
        Err(error) => PortUse::Unusable(error.to_string()),
    }
}

/// The refusal if another process listens at `endpoint`, where a broker is to listen. For other problems with the address, the
/// broker's own message is better.
pub fn port_taken(root: &Root, endpoint: SocketAddr) -> Option<Refusal> {
    match port_use(root, endpoint) {
        found @ PortUse::Taken(_) => check(&found, endpoint.port()).err(),
        _ => None,
    }
}

/// Whether `refusal` is that of [`check`] for a port that another process has: any user can take a free one.
pub fn is_port_taken(refusal: &Refusal) -> bool {
    refusal.message.starts_with("port ") && refusal.message.contains(TAKEN)
}

const TAKEN: &str = " of this host is taken by ";

/// Whether a broker can listen on it.
///
/// # Errors
/// What prevents it, with the remedy.
pub fn check(found: &PortUse, port: u16) -> Result<(), Refusal> {
    let remedy = "free it, or set spec.broker.port to another port";
    let taken = |who: &str| Err(Refusal::transient(format!("port {port}{TAKEN}{who}; {remedy}")));
    let problem = match found {
        PortUse::Free | PortUse::Ours => return Ok(()),
        PortUse::Taken(Holder::Process(pid, name)) => return taken(&format!("{name} (pid {pid})")),
        PortUse::Taken(Holder::User(uid)) => {
            return taken(&format!("a socket of the user with uid {uid}; no process was found that has it"));
        }
        PortUse::Taken(Holder::Unknown) => {
            return taken("a process that can't be named (`ss --tcp --bound-inactive --processes` may list it)");
        }
        PortUse::Unusable(why) => format!("can't be used to listen: {why}"),
    };
    Err(Refusal::transient(format!("port {port} of this host {problem}; {remedy}")))
}

/// A socket that is only bound has the port too, but no line in these tables.
fn holder(root: &Root, endpoint: SocketAddr) -> Holder {
    let read = |path| fs::read_to_string(root.path(path)).unwrap_or_default();
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(read);
    let Some((inode, uid)) = socket_at(&tables, endpoint) else { return Holder::Unknown };
    let socket = format!("socket:[{inode}]");
    let mut processes = processes(root).unwrap_or_default().into_iter();
    let process = processes.find_map(|process| {
        let mut descriptors = fs::read_dir(process.dir.join("fd")).ok()?.flatten();
        descriptors.find(|fd| fs::read_link(fd.path()).is_ok_and(|link| link.as_os_str() == socket.as_str()))?;
        Some(Holder::Process(process.pid, process.name()))
    });
    process.unwrap_or(Holder::User(uid))
}

/// Inode and uid of the socket that has the port of `endpoint` at its address or at all addresses (or at any, if `endpoint` has none),
/// from tables in the format of /proc/net/tcp (proc(5)). One that listens (state 0A) comes first: what is connected may share the port.
/// No table says whether a socket at `::` has the port for IPv4, too, so that one comes last.
fn socket_at(tables: &[String], endpoint: SocketAddr) -> Option<(u64, u32)> {
    let wanted = endpoint.ip().to_canonical();
    let found = tables.iter().flat_map(|table| table.lines().skip(1)).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (address, port) = fields.get(1)?.rsplit_once(':')?;
        let address = address_of(address)?;
        let is_of_other_version = address.is_ipv6() != wanted.is_ipv6();
        let is_there = if is_of_other_version {
            [address, wanted].iter().any(|ip| ip.is_ipv6() && ip.is_unspecified())
        } else {
            address == wanted || address.is_unspecified() || wanted.is_unspecified()
        };
        let socket: (u64, u32) = (fields.get(9)?.parse().ok()?, fields.get(7)?.parse().ok()?);
        // A socket that its process has closed (TIME_WAIT) has inode 0, and no uid of its own.
        let counts = is_there && socket.0 != 0 && u16::from_str_radix(port, 16) == Ok(endpoint.port());
        counts.then_some(((is_of_other_version, *fields.get(3)? != "0A"), socket))
    });
    found.min_by_key(|(order, _)| *order).map(|(_, socket)| socket)
}

/// An address in such a table: 32-bit words in hexadecimal, each in this machine's byte order.
fn address_of(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| u32::from_str_radix(hex.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    match hex.len() {
        8 => Some(IpAddr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?];
            let bytes: [u8; 16] = words.concat().try_into().ok()?;
            Some(IpAddr::from(bytes).to_canonical())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        os::{fd::AsRawFd, unix::net::UnixStream},
    };

    use nix::{
        sys::socket::{
            AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, SockaddrIn, bind, connect, getsockname,
            sendmsg, socket,
        },
        unistd::geteuid,
    };

    use super::*;

    #[test]
    fn a_taken_port_is_reported_with_the_process_that_has_it() {
        let root = Root::host();
        for address in ["127.0.0.1:0", "0.0.0.0:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let port = listener.local_addr().unwrap().port();
            let endpoint = SocketAddr::from(([127, 0, 0, 1], port));
            // Even without the right to see other processes' descriptors, we see our own.
            let found = port_use(&root, endpoint);
            let own = i32::try_from(std::process::id()).unwrap();
            assert!(matches!(found, PortUse::Taken(Holder::Process(pid, _)) if pid == own), "{address}: {found:?}");
            let anywhere = port_use(&root, SocketAddr::from(([0, 0, 0, 0], port)));
            assert!(
                matches!(anywhere, PortUse::Taken(Holder::Process(pid, _)) if pid == own),
                "{address}: {anywhere:?}"
            );
            if address.starts_with("127") {
                assert_eq!(port_use(&root, SocketAddr::from(([127, 0, 0, 2], port))), PortUse::Free);
            }
            drop(listener);
            assert_eq!(port_use(&root, endpoint), PortUse::Free);
        }
    }

    /// `_from` lives until the end, because Linux closes a socket in transit that nobody can receive.
    #[test]
    fn a_listening_socket_that_no_process_has_is_reported_with_its_user() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = listener.local_addr().unwrap();
        let (to, _from) = UnixStream::pair().unwrap();
        let descriptors = [listener.as_raw_fd()];
        let message = [ControlMessage::ScmRights(&descriptors)];
        sendmsg::<()>(to.as_raw_fd(), &[io::IoSlice::new(b"x")], &message, MsgFlags::empty(), None).unwrap();
        drop(listener);
        assert_eq!(port_use(&Root::host(), endpoint), PortUse::Taken(Holder::User(geteuid().as_raw())));
    }

    #[test]
    fn a_connected_socket_that_takes_the_port_is_reported_with_the_process_that_has_it() {
        let peer = TcpListener::bind("127.0.0.1:0").unwrap();
        let connected = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(connected.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
        let to = SockaddrIn::new(127, 0, 0, 1, peer.local_addr().unwrap().port());
        connect(connected.as_raw_fd(), &to).unwrap();
        let port = getsockname::<SockaddrIn>(connected.as_raw_fd()).unwrap().port();
        let found = port_use(&Root::host(), SocketAddr::from(([127, 0, 0, 1], port)));
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(matches!(found, PortUse::Taken(Holder::Process(pid, _)) if pid == own), "{found:?}");
    }

    #[test]
    fn of_the_sockets_at_a_port_the_likeliest_holder_is_found() {
        let line = |address: &str, state: &str, uid: u32, inode: u32| {
            format!(
                "   0: {address}:1F72 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {uid} 0 {inode} 1 0\n"
            )
        };
        let table = |lines: &[&String]| {
            lines.iter().fold("  sl  local_address ...\n".to_owned(), |table, line| table + line.as_str())
        };
        let word = |bytes| format!("{:08X}", u32::from_ne_bytes(bytes));
        let (ours, all) = (word([10, 0, 0, 1]), word([0; 4]));
        let (v6, mapped) = ("0".repeat(32), format!("{}{}{ours}", "0".repeat(16), word([0, 0, 0xff, 0xff])));
        let (other_v6, elsewhere) = (format!("{}{}", "0".repeat(24), word([0, 0, 0, 2])), word([10, 0, 0, 2]));
        let at = |tcp: &[&String], tcp6: &[&String], address: &str| {
            socket_at(&[table(tcp), table(tcp6)], SocketAddr::new(address.parse().unwrap(), 8050))
        };
        let innocent = line(&v6, "0A", 1, 11);
        let (connected, listening) = (line(&ours, "01", 2, 12), line(&all, "0A", 3, 13));
        assert_eq!(at(&[], &[&innocent], "10.0.0.1"), Some((11, 1)));
        assert_eq!(at(&[&connected], &[&innocent], "10.0.0.1"), Some((12, 2)));
        assert_eq!(at(&[&connected, &listening], &[&innocent], "10.0.0.1"), Some((13, 3)));
        assert_eq!(at(&[], &[&innocent, &line(&mapped, "0A", 4, 14)], "10.0.0.1"), Some((14, 4)));
        // IPv4 at all addresses takes no port at one of IPv6.
        assert_eq!(at(&[&listening], &[&line(&other_v6, "0A", 5, 15)], "::2"), Some((15, 5)));
        assert_eq!(at(&[&connected], &[], "::2"), None);
        for nobodys in [line(&ours, "06", 0, 0), line(&elsewhere, "0A", 6, 16), line(&other_v6, "0A", 6, 16)] {
            assert_eq!(at(&[&nobodys], &[], "10.0.0.1"), None);
        }
    }

    #[test]
    fn a_bound_socket_that_does_not_listen_takes_the_port_too() {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        assert_eq!(port_use(&Root::host(), socket.local_addr().unwrap()), PortUse::Taken(Holder::Unknown));
    }
}
