//! Which process has the port that a broker is to listen on.

use std::{
    fs,
    io::ErrorKind,
    net::{SocketAddr, TcpListener},
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
    /// Another process: pid and name, if it listens there and they are known.
    Taken(Option<(i32, String)>),
    /// It can't be listened on for another reason.
    Unusable(String),
}

/// Tries to listen, for an instant, as a broker would. A process that has the port at another address does not matter.
pub fn port_use(root: &Root, endpoint: SocketAddr) -> PortUse {
    match TcpListener::bind(endpoint) {
        Ok(_) => PortUse::Free,
        Err(error) if error.kind() == ErrorKind::AddrInUse => PortUse::Taken(holder(root, endpoint.port())),
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
        PortUse::Taken(Some((pid, name))) => return taken(&format!("{name} (pid {pid})")),
        PortUse::Taken(None) => {
            return taken("a process that can't be named (`ss --tcp --bound-inactive --processes` may list it)");
        }
        PortUse::Unusable(why) => format!("can't be used to listen: {why}"),
    };
    Err(Refusal::transient(format!("port {port} of this host {problem}; {remedy}")))
}

/// A socket that is bound and does not listen has the port too, but no line in these tables.
fn holder(root: &Root, port: u16) -> Option<(i32, String)> {
    let read = |path| fs::read_to_string(root.path(path)).unwrap_or_default();
    let inode = listener(&read("/proc/net/tcp"), port).or_else(|| listener(&read("/proc/net/tcp6"), port))?;
    let socket = format!("socket:[{inode}]");
    processes(root).ok()?.into_iter().find_map(|process| {
        let mut descriptors = fs::read_dir(process.dir.join("fd")).ok()?.flatten();
        descriptors.find(|fd| fs::read_link(fd.path()).is_ok_and(|link| link.as_os_str() == socket.as_str()))?;
        Some((process.pid, process.name()))
    })
}

/// Inode of the socket that listens (state 0A) on `port`, from a table in the format of /proc/net/tcp (proc(5)).
fn listener(table: &str, port: u16) -> Option<u64> {
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let local = fields.get(1)?.rsplit_once(':')?.1;
        let listens = *fields.get(3)? == "0A" && u16::from_str_radix(local, 16) == Ok(port);
        listens.then(|| fields.get(9)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_is_reported_with_the_process_that_has_it() {
        let root = Root::host();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = listener.local_addr().unwrap();
        let PortUse::Taken(holder) = port_use(&root, endpoint) else { panic!("{endpoint} should be taken") };
        // Even without the right to see other processes' descriptors, we see our own.
        assert_eq!(holder.map(|(pid, _)| pid), i32::try_from(std::process::id()).ok());
        assert_eq!(port_use(&root, SocketAddr::from(([127, 0, 0, 2], endpoint.port()))), PortUse::Free);
        drop(listener);
        assert_eq!(port_use(&root, endpoint), PortUse::Free);
    }

    #[test]
    fn a_bound_socket_that_does_not_listen_takes_the_port_too() {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        assert_eq!(port_use(&Root::host(), socket.local_addr().unwrap()), PortUse::Taken(None));
    }
}
