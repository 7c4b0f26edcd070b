use std::{
    fs,
    io::{self, ErrorKind},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
};

use super::PortUse;
use crate::host::{Root, processes::processes};

/// Tries to listen, for an instant, as a broker would.
pub(super) fn look(root: &Root, port: u16) -> PortUse {
    for address in [SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)), SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))] {
        match TcpListener::bind(address) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::AddrInUse => return PortUse::Taken(holder(root, port)),
            // A host without IPv6.
            Err(error) if address.is_ipv6() && is_no_ipv6(&error) => {}
            Err(error) => return PortUse::Unusable(error.to_string()),
        }
    }
    PortUse::Free
}

fn is_no_ipv6(error: &io::Error) -> bool {
    error.kind() == ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(nix::errno::Errno::EAFNOSUPPORT as i32)
}

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

/// Inode of the socket that listens (state 0A) on `port`, in a table as of proc(5) /proc/net/tcp.
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
    fn a_port_that_somebody_holds_is_told_with_his_name() {
        let root = Root::host();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let PortUse::Taken(holder) = look(&root, port) else { panic!("port {port} should be taken") };
        // Without the right to see other processes' descriptors, our own are still seen.
        assert_eq!(holder.map(|(pid, _)| pid), i32::try_from(std::process::id()).ok());
        drop(listener);
        assert_eq!(look(&root, port), PortUse::Free);
    }
}
