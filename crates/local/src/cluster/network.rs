//! The nodes' network: one bridge, on which the machine itself has an address, and a veth pair for each node. No route
//! leads out of it; nodes reach other hosts through the [`super::proxy`].

use std::{
    net::{IpAddr, Ipv4Addr},
    os::fd::AsRawFd,
};

use futures::TryStreamExt;
use rtnetlink::{
    Handle, LinkBridge, LinkUnspec, LinkVeth, RouteMessageBuilder,
    packet_route::{
        address::AddressAttribute,
        link::{LinkAttribute, LinkMessage},
        route::{RouteAddress, RouteAttribute},
    },
};

use nix::libc;

use super::layout::Cluster;
use crate::error::{Context, LocalError};

/// Prefix of the bridges' names; a number follows.
const BRIDGE_NAME: &str = "fxd";
/// The maximum number of local clusters on one machine.
const CANDIDATES: u8 = 24;
/// The first candidate for the nodes' /16. These networks are rarely in use.
const FIRST_NETWORK: [u8; 2] = [10, 231];

/// A netlink connection to the network namespace that the calling thread has now; it stays there if the thread moves.
pub(crate) struct Network {
    handle: Handle,
}

impl Network {
    pub(crate) fn connect() -> Result<Self, LocalError> {
        let (connection, handle, _) =
            rtnetlink::new_connection().context(|| "can't open a netlink socket".to_owned())?;
        tokio::spawn(connection);
        Ok(Self { handle })
    }

    /// Chooses a bridge name and a network that are unused on this machine.
    pub(crate) async fn choose(&self) -> Result<(String, Ipv4Addr), LocalError> {
        let links = self.links().await?;
        let used = self.used_networks().await?;
        // The same number for both, so that the cluster that makes the bridge first also owns the network.
        let of = |number| {
            let network = Ipv4Addr::new(FIRST_NETWORK[0], FIRST_NETWORK[1] + number, 0, 0);
            (format!("{BRIDGE_NAME}{number}"), network)
        };
        let is_free = |(bridge, network): &(String, Ipv4Addr)| {
            !links.iter().any(|link| link_name(link) == Some(bridge))
                && !used.iter().any(|(address, length)| overlap(*network, *address, *length))
        };
        (0..CANDIDATES).map(of).find(is_free).ok_or(LocalError::NoNetwork(CANDIDATES))
    }

    async fn used_networks(&self) -> Result<Vec<(Ipv4Addr, u8)>, LocalError> {
        let mut used = Vec::new();
        let mut addresses = self.handle.address().get().execute();
        while let Some(message) = addresses.try_next().await.context(|| "can't list addresses".to_owned())? {
            for attribute in &message.attributes {
                if let AddressAttribute::Address(IpAddr::V4(address)) = attribute {
                    used.push((*address, message.header.prefix_len));
                }
            }
        }
        let mut routes = self.handle.route().get(RouteMessageBuilder::<Ipv4Addr>::new().build()).execute();
        while let Some(message) = routes.try_next().await.context(|| "can't list routes".to_owned())? {
            for attribute in &message.attributes {
                // The default route has no destination.
                if let RouteAttribute::Destination(RouteAddress::Inet(address)) = attribute {
                    used.push((*address, message.header.destination_prefix_length));
                }
            }
        }
        Ok(used)
    }

    /// Makes the bridge with the machine's address on it. Returns false if another cluster made it first.
    pub(crate) async fn make_bridge(&self, cluster: &Cluster) -> Result<bool, LocalError> {
        let bridge = &cluster.bridge;
        match self.handle.link().add(LinkBridge::new(bridge).build()).execute().await {
            Err(rtnetlink::Error::NetlinkError(refusal)) if refusal.raw_code() == -libc::EEXIST => return Ok(false),
            made => made.context(|| format!("can't make the bridge {bridge}; the kernel needs the module `bridge`"))?,
        }
        let addressed = self.set_address(bridge, cluster.gateway()).await;
        if addressed.is_err() {
            self.remove(bridge).await?;
        }
        addressed.map(|()| true)
    }

    /// Makes a node's veth pair and puts one end into the network namespace `namespace`.
    pub(crate) async fn plug_in(
        &self,
        cluster: &Cluster,
        number: u32,
        namespace: &impl AsRawFd,
    ) -> Result<(), LocalError> {
        let ours = cluster.link(number);
        let theirs = format!("{}p{number}", cluster.bridge);
        let failed = || format!("can't make the link {ours}; the kernel needs the module `veth`");
        let bridge = self.require(&cluster.bridge).await?;
        // One may be left while the node's previous network namespace is still being destroyed.
        self.remove(&ours).await?;
        self.handle.link().add(LinkVeth::new(&ours, &theirs).build()).execute().await.context(failed)?;
        let theirs = LinkUnspec::new_with_index(self.require(&theirs).await?).setns_by_fd(namespace.as_raw_fd());
        self.handle.link().set(theirs.build()).execute().await.context(failed)?;
        let ours = LinkUnspec::new_with_index(self.require(&ours).await?).controller(bridge).up();
        self.handle.link().set(ours.build()).execute().await.context(failed)
    }

    /// Called inside the node: names its end eth0, sets its address, and brings up the loopback.
    pub(crate) async fn settle_in(&self, cluster: &Cluster, number: u32) -> Result<(), LocalError> {
        let index = self.require(&format!("{}p{number}", cluster.bridge)).await?;
        let named = LinkUnspec::new_with_index(index).name("eth0");
        self.handle.link().set(named.build()).execute().await.context(|| "can't name eth0".to_owned())?;
        self.set_address("eth0", cluster.address(number)).await?;
        let loopback = LinkUnspec::new_with_index(self.require("lo").await?).up();
        self.handle.link().set(loopback.build()).execute().await.context(|| "can't bring up lo".to_owned())
    }

    async fn set_address(&self, link: &str, address: Ipv4Addr) -> Result<(), LocalError> {
        let index = self.require(link).await?;
        let failed = || format!("can't give {link} the address {address}");
        self.handle.address().add(index, address.into(), Cluster::PREFIX).execute().await.context(failed)?;
        self.handle.link().set(LinkUnspec::new_with_index(index).up().build()).execute().await.context(failed)
    }

    /// Removes a link if it exists; with it goes the other end of a veth pair.
    pub(crate) async fn remove(&self, name: &str) -> Result<(), LocalError> {
        let Some(index) = self.index(name).await? else {
            return Ok(());
        };
        match self.handle.link().del(index).execute().await {
            // The kernel may remove our end together with the node's network namespace.
            Err(_) if self.index(name).await?.is_none() => Ok(()),
            done => done.context(|| format!("can't remove the link {name}")),
        }
    }

    /// Removes the bridge and all links whose names derive from it.
    pub(crate) async fn remove_all(&self, cluster: &Cluster) -> Result<(), LocalError> {
        for link in self.links().await? {
            if let Some(name) = link_name(&link)
                && is_ours(name, &cluster.bridge)
            {
                self.remove(name).await?;
            }
        }
        Ok(())
    }

    async fn links(&self) -> Result<Vec<LinkMessage>, LocalError> {
        self.handle.link().get().execute().try_collect().await.context(|| "can't list links".to_owned())
    }

    async fn index(&self, name: &str) -> Result<Option<u32>, LocalError> {
        Ok(self.links().await?.iter().find(|link| link_name(link) == Some(name)).map(|link| link.header.index))
    }

    async fn require(&self, name: &str) -> Result<u32, LocalError> {
        self.index(name).await?.ok_or_else(|| LocalError::LinkGone(name.to_owned()))
    }
}

fn link_name(link: &LinkMessage) -> Option<&str> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.as_str()),
        _ => None,
    })
}

/// True for `fxd1` itself and for `fxd1n7` and `fxd1p7`, false for `fxd10`.
fn is_ours(name: &str, bridge: &str) -> bool {
    name.strip_prefix(bridge).is_some_and(|rest| rest.is_empty() || rest.starts_with('n') || rest.starts_with('p'))
}

fn overlap(network: Ipv4Addr, address: Ipv4Addr, length: u8) -> bool {
    let common = length.min(Cluster::PREFIX);
    // A default route overlaps with every network, but doesn't conflict.
    common > 0 && (u32::from(network) ^ u32::from(address)) >> (32 - u32::from(common)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_in_use_is_not_chosen() {
        let network = Ipv4Addr::new(10, 231, 0, 0);
        for (address, length, overlaps) in [
            ([10, 231, 7, 0], 24, true),
            ([10, 0, 0, 0], 8, true),
            ([10, 231, 0, 1], 32, true),
            ([10, 232, 0, 0], 16, false),
            ([192, 0, 2, 0], 24, false),
            ([0, 0, 0, 0], 0, false),
        ] {
            assert_eq!(overlap(network, Ipv4Addr::from(address), length), overlaps, "{address:?}/{length}");
        }
    }

    #[test]
    fn the_links_of_another_cluster_are_not_ours() {
        for (name, ours) in [("fxd1", true), ("fxd1n7", true), ("fxd1p7", true), ("fxd10", false), ("fxd2n7", false)] {
            assert_eq!(is_ours(name, "fxd1"), ours, "{name}");
        }
    }
}
