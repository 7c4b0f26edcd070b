//! A conda channel that is made when a test runs, and a small server for it that can misbehave.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use axum::{
    body::{Body, Bytes},
    extract::{Request, State},
    http::{StatusCode, header},
    response::Response,
};
use futures::StreamExt;
use rattler_conda_types::compression_level::CompressionLevel;
use rattler_package_streaming::write;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

/// As long as those of conda-build: the place for the real prefix in a binary.
pub fn placeholder() -> String {
    format!("/opt/{}", "placehold_".repeat(25))
}

/// A file of a package.
pub struct Content {
    path: &'static str,
    bytes: Vec<u8>,
    mode: u32,
    prefix: Option<&'static str>,
    target: Option<&'static str>,
}

impl Content {
    /// A script that names the prefix in its interpreter line and its text.
    pub fn script(path: &'static str, text: &str) -> Self {
        Self {
            path,
            bytes: text.replace("PREFIX", &placeholder()).into_bytes(),
            mode: 0o755,
            prefix: Some("text"),
            target: None,
        }
    }

    /// A file with the prefix in the middle of binary data.
    pub fn binary(path: &'static str) -> Self {
        let bytes = [b"\x7fELF\0\0", placeholder().as_bytes(), b"/etc\0tail\0\xff"].concat();
        Self { path, bytes, mode: 0o755, prefix: Some("binary"), target: None }
    }

    /// A symlink to a file of another package.
    pub fn link(path: &'static str, target: &'static str) -> Self {
        Self { path, bytes: Vec::new(), mode: 0o777, prefix: None, target: Some(target) }
    }

    /// A file without any prefix.
    pub fn plain(path: &'static str, bytes: &[u8]) -> Self {
        Self { path, bytes: bytes.to_vec(), mode: 0o644, prefix: None, target: None }
    }
}

/// A channel in a directory of its own.
pub struct Channel {
    directory: tempfile::TempDir,
    platform: &'static str,
    conda: Map<String, Value>,
    bz2: Map<String, Value>,
}

impl Channel {
    pub fn new() -> Self {
        let (directory, platform) = (tempfile::tempdir().unwrap(), "linux-64");
        fs::create_dir(directory.path().join("noarch")).unwrap();
        fs::create_dir(directory.path().join(platform)).unwrap();
        let empty = json!({"info": {"subdir": "noarch"}, "packages": {}, "packages.conda": {}});
        fs::write(directory.path().join("noarch/repodata.json"), empty.to_string()).unwrap();
        let mut channel = Self { directory, platform, conda: Map::new(), bz2: Map::new() };
        channel.index();
        channel
    }

    /// flux-core (.conda) that needs libflux (.tar.bz2).
    pub fn with_flux() -> Self {
        let mut channel = Self::new();
        channel.add(
            "libflux",
            ".tar.bz2",
            &["__glibc >=2.17"],
            &[Content::binary("lib/libflux.so"), Content::plain("share/big", &noise(300_000))],
        );
        channel.add(
            "flux-core",
            ".conda",
            &["libflux"],
            &[Content::script("bin/flux", "#!/bin/sh\necho PREFIX/etc\n"), Content::plain("share/flux", b"plain")],
        );
        channel
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn file_url(&self) -> String {
        url::Url::from_directory_path(self.path()).unwrap().to_string()
    }

    pub fn add(&mut self, name: &str, extension: &str, depends: &[&str], files: &[Content]) {
        self.add_release((name, "1.0", 0), extension, depends, files);
    }

    /// Adds a package with another version or build number than 1.0 and 0.
    pub fn add_release(
        &mut self,
        (name, version, number): (&str, &str, u64),
        extension: &str,
        depends: &[&str],
        files: &[Content],
    ) {
        let build = tempfile::tempdir().unwrap();
        let index = json!({
            "name": name, "version": version, "build": number.to_string(), "build_number": number, "depends": depends,
            "subdir": self.platform, "arch": "x86_64", "platform": "linux", "timestamp": 1_700_000_000_000_u64,
        });
        let mut paths = vec![PathBuf::from("info/index.json"), PathBuf::from("info/paths.json")];
        let mut entries = Vec::new();
        for file in files {
            match file.target {
                Some(target) => link(&build.path().join(file.path), target),
                None => put(&build.path().join(file.path), &file.bytes, file.mode),
            }
            let mut entry = json!({
                "_path": file.path, "path_type": if file.target.is_some() { "softlink" } else { "hardlink" }, "size_in_bytes": file.bytes.len(),
                "sha256": hex::encode(Sha256::digest(&file.bytes)),
            });
            if let Some(mode) = file.prefix {
                entry["file_mode"] = json!(mode);
                entry["prefix_placeholder"] = json!(placeholder());
            }
            entries.push(entry);
            paths.push(file.path.into());
        }
        put(&build.path().join("info/index.json"), index.to_string().as_bytes(), 0o644);
        let entries = json!({"paths": entries, "paths_version": 1}).to_string();
        put(&build.path().join("info/paths.json"), entries.as_bytes(), 0o644);
        let paths = paths.iter().map(|p| build.path().join(p)).collect::<Vec<_>>();
        let stem = format!("{name}-{version}-{number}");
        let file_name = format!("{stem}{extension}");
        let archive = self.path().join(self.platform).join(&file_name);
        let out = fs::File::create(&archive).unwrap();
        let level = CompressionLevel::Default;
        match extension {
            ".conda" => write::write_conda_package(out, build.path(), &paths, level, None, &stem, None, None),
            _ => write::write_tar_bz2_package(out, build.path(), &paths, level, None, None),
        }
        .unwrap();
        let bytes = fs::read(&archive).unwrap();
        let mut record = index;
        record["sha256"] = json!(hex::encode(Sha256::digest(&bytes)));
        record["size"] = json!(bytes.len());
        let records = if extension == ".conda" { &mut self.conda } else { &mut self.bz2 };
        records.insert(file_name, record);
        self.index();
    }

    /// Where the archive of a package is.
    pub fn archive(&self, file_name: &str) -> PathBuf {
        self.path().join(self.platform).join(file_name)
    }

    /// Lists the same packages for another platform; their archives are not there.
    pub fn list_for(&self, platform: &str) {
        let relist = |records: &Map<String, Value>| {
            let mut records = records.clone();
            records.values_mut().for_each(|record| record["subdir"] = json!(platform));
            records
        };
        let repodata = json!({
            "info": {"subdir": platform}, "packages": relist(&self.bz2), "packages.conda": relist(&self.conda),
        });
        fs::create_dir_all(self.path().join(platform)).unwrap();
        fs::write(self.path().join(platform).join("repodata.json"), repodata.to_string()).unwrap();
    }

    fn index(&mut self) {
        let repodata = json!({
            "info": {"subdir": self.platform}, "packages": self.bz2, "packages.conda": self.conda,
        });
        fs::write(self.archive("repodata.json"), repodata.to_string()).unwrap();
    }
}

/// Bytes that don't compress.
pub fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

fn link(path: &Path, target: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(target, path).unwrap();
}

fn put(path: &Path, bytes: &[u8], mode: u32) {
    use std::os::unix::fs::OpenOptionsExt;
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut file = fs::File::options().create_new(true).write(true).mode(mode).open(path).unwrap();
    file.write_all(bytes).unwrap();
}

/// Serves a directory over HTTP.
pub struct Server {
    url: String,
    trouble: Arc<Trouble>,
}

/// How the server misbehaves.
#[derive(Default)]
pub struct Trouble {
    root: PathBuf,
    /// So many more answers are cut in the middle.
    pub cuts: AtomicU64,
    /// Any wish for a part is ignored if this isn't 0.
    pub no_ranges: AtomicU64,
    /// Bytes of bodies that were sent.
    pub sent: AtomicU64,
    /// Paths that were asked for.
    pub asked: Mutex<Vec<String>>,
    /// Answers in the server's place, if it is there and gives one.
    hook: Mutex<Option<Hook>>,
}

type Hook = Box<dyn Fn(&Request) -> Option<Response> + Send>;

impl Server {
    pub async fn start(root: &Path) -> Self {
        Self::start_at(root, 0).await
    }

    pub async fn start_at(root: &Path, port: u16) -> Self {
        let trouble = Arc::new(Trouble { root: root.to_owned(), ..Trouble::default() });
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let router = axum::Router::new().fallback(serve).with_state(trouble.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, trouble }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn trouble(&self) -> &Trouble {
        &self.trouble
    }

    /// From now on `hook` is asked first.
    pub fn hook(&self, hook: impl Fn(&Request) -> Option<Response> + Send + 'static) {
        *self.trouble.hook.lock().unwrap() = Some(Box::new(hook));
    }

    /// Bytes of bodies that were sent until now.
    pub fn sent(&self) -> u64 {
        self.trouble.sent.load(Ordering::SeqCst)
    }
}

async fn serve(State(server): State<Arc<Trouble>>, request: Request) -> Response {
    if let Some(answer) = server.hook.lock().unwrap().as_ref().and_then(|hook| hook(&request)) {
        return answer;
    }
    let path = request.uri().path().trim_start_matches('/');
    server.asked.lock().unwrap().push(path.to_owned());
    let Ok(all) = fs::read(server.root.join(path)) else {
        return Response::builder().status(StatusCode::NOT_FOUND).body(Body::empty()).unwrap();
    };
    let wish = request.headers().get(header::RANGE).and_then(|v| v.to_str().ok());
    let from = wish.and_then(|v| v.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let from = from.filter(|_| server.no_ranges.load(Ordering::SeqCst) == 0);
    let total = all.len();
    let (status, part) = match from {
        Some(from) if from >= total => (StatusCode::RANGE_NOT_SATISFIABLE, Vec::new()),
        Some(from) => (StatusCode::PARTIAL_CONTENT, all[from..].to_vec()),
        None => (StatusCode::OK, all),
    };
    let mut answer = Response::builder().status(status).header(header::ETAG, "\"1\"");
    if let (StatusCode::PARTIAL_CONTENT, Some(from)) = (status, from) {
        answer = answer.header(header::CONTENT_RANGE, format!("bytes {from}-{}/{total}", total - 1));
    }
    let cut = !path.ends_with(".json")
        && server.cuts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
    let body = if cut { part[..part.len() / 2].to_vec() } else { part.clone() };
    server.sent.fetch_add(body.len() as u64, Ordering::SeqCst);
    if !cut {
        return answer.body(Body::from(body)).unwrap();
    }
    // The server throws away what it has not sent when the body fails, so it gets the time to send.
    let pieces = futures::stream::iter([Some(body), None]).then(async |piece| match piece {
        Some(piece) => Ok(Bytes::from(piece)),
        None => {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            Err(std::io::Error::other("cut"))
        }
    });
    answer.header(header::CONTENT_LENGTH, part.len()).body(Body::from_stream(pieces)).unwrap()
}
