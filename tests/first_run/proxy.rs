//! A machine that reaches its package sources only through a proxy. The nodes reach only this machine.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    sync::{Arc, Mutex},
};

use crate::{Place, Said, until};

/// A proxy on loopback that answers each request with `content`, except tunnels, which it closes.
struct Proxy {
    address: String,
    /// The heads of the requests.
    requests: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    fn start(content: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let heard = requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, mut head) = (stream.unwrap(), [0; 4096]);
                let length = stream.read(&mut head).unwrap_or_default();
                let head = String::from_utf8_lossy(&head[..length]).to_lowercase();
                if !head.starts_with("connect ") {
                    let length = content.len();
                    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
                    let _ = stream.write_all(&[answer.as_bytes(), &content].concat());
                }
                heard.lock().unwrap().push(head);
            }
        });
        Self { address, requests }
    }

    fn url(&self) -> String {
        format!("http://me:secret@{}", self.address)
    }

    /// How many requests began with `line` and were authorized.
    fn count(&self, line: &str) -> usize {
        let authorized = |head: &&String| head.contains("proxy-authorization: basic bwu6c2vjcmv0");
        self.requests.lock().unwrap().iter().filter(|head| head.starts_with(line)).filter(authorized).count()
    }
}

#[test]
fn nodes_fetch_through_the_proxy_of_the_machine() {
    let Some(place) = Place::new() else { return };
    let proxy = Proxy::start(fs::read(place.bundle()).unwrap());
    let wrong = "0".repeat(64);
    let up = |more: &[&str], variable: &str| {
        let words = [&["up", "--nodes", "1", "--api", "embedded", "--sha256", &wrong], more].concat();
        Said::of(place.command(&words).env(variable, proxy.url()).output().unwrap())
    };
    // No such host exists. That sha256 is not the bundle's, so the node must have fetched it.
    let said = up(&["--bundle", "http://packages.invalid/flux.tar.gz"], "HTTP_PROXY");
    assert!(said.code == Some(1) && said.err.contains("node1 has failed") && said.err.contains(&wrong), "{said:?}");
    assert!(proxy.count("get http://packages.invalid/flux.tar.gz ") >= 2, "{:?}", proxy.requests);

    let said = up(&["--bundle", "https://packages.invalid/flux.tar.gz", "--no-wait"], "HTTPS_PROXY");
    assert_eq!(said.code, Some(0), "{said:?}");
    until("the node's tunnel", || (proxy.count("connect packages.invalid:443 ") > 0).then_some(()));
}

#[test]
fn a_proxy_that_is_of_no_use_is_named_without_its_password() {
    let Some(place) = Place::new() else { return };
    for (proxy, words) in [
        ("http://me:secret@127.0.0.1:1", "flux.tar.gz through the proxy http://127.0.0.1:1/ "),
        ("socks5://me:secret@127.0.0.1:1", "can't use the proxy socks5://127.0.0.1:1/, only one at an http:// URL"),
    ] {
        let mut up =
            place.command(&["up", "--bundle", "https://packages.invalid/flux.tar.gz", "--sha256", &"0".repeat(64)]);
        let said = Said::of(up.env("HTTPS_PROXY", proxy).output().unwrap());
        assert_eq!(said.code, Some(2), "{said:?}");
        assert!(said.err.contains(words) && !said.err.contains("secret"), "{said:?}");
        assert!(!place.state().exists());
    }
}
