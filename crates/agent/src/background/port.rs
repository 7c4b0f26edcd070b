//! A TCP port at which this agent serves. If another process has it, the node's message says so, the agent tries again, and
//! everything else goes on.

use std::{future::Future, io, net::SocketAddr, time::Duration};

use tokio::{net::TcpListener, sync::watch, time::sleep};
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

/// How often a port that is taken is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(10);

/// A port, until it is dropped.
pub struct Port {
    address: SocketAddr,
    what: &'static str,
    /// Why the agent can't bind it; None if it has.
    trouble: watch::Receiver<Option<String>>,
    _task: AbortOnDropHandle<()>,
}

impl Port {
    /// Binds `address` and hands the listener to `serve`; `what` names the service in messages. Awaits the first try, so that the
    /// agent's first status already tells its result.
    pub async fn hold<S>(
        what: &'static str,
        address: SocketAddr,
        serve: impl Fn(TcpListener) -> S + Send + 'static,
    ) -> Self
    where
        S: Future<Output = ()> + Send + 'static,
    {
        let mut listener = TcpListener::bind(address).await;
        if let Err(error) = &listener {
            warn!(%address, what, %error, "can't serve; all else goes on");
        }
        let (sender, trouble) = watch::channel(listener.as_ref().err().map(why));
        let task = tokio::spawn(async move {
            loop {
                sender.send_replace(listener.as_ref().err().map(why));
                if let Ok(listener) = listener {
                    info!(%address, what, "serving");
                    serve(listener).await;
                }
                sleep(TRY_AGAIN).await;
                listener = TcpListener::bind(address).await;
            }
        });
        Self { address, what, trouble, _task: AbortOnDropHandle::new(task) }
    }

    /// Its address, if the agent has bound it.
    pub fn address(&self) -> Option<SocketAddr> {
        self.trouble.borrow().is_none().then_some(self.address)
    }

    /// Why the agent can't bind it and what to do, for people.
    pub fn trouble(&self) -> Option<String> {
        let (address, what) = (self.address, self.what);
        self.trouble.borrow().as_ref().map(|why| {
            format!("the agent can't serve {what} at {address}: {why}; it tries again every {} s", TRY_AGAIN.as_secs())
        })
    }
}

fn why(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => "another process listens there, end it (`ss -lntp` names it)".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_taken_port_is_named_and_bound_once_it_is_free() {
        // The whole of 127.0.0.0/8 belongs to this machine, and nothing else uses this address.
        let stranger = std::net::TcpListener::bind((IpAddr::from([127, 82, 6, 1]), 0)).unwrap();
        let address = stranger.local_addr().unwrap();
        let serve = |listener: TcpListener| async move { while listener.accept().await.is_ok() {} };
        let mut port = Port::hold("numbers", address, serve).await;
        let said = port.trouble().unwrap();
        assert!(said.contains(&address.to_string()) && said.contains("numbers") && said.contains("ss -lntp"), "{said}");
        assert_eq!(port.address(), None);

        drop(stranger);
        port.trouble.wait_for(Option::is_none).await.unwrap();
        assert_eq!((port.address(), port.trouble()), (Some(address), None));
        assert!(TcpListener::bind(address).await.is_err(), "it is held");
    }
}
