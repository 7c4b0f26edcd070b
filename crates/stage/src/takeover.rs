//! An administrator's word that this host's node shall lead: what the new lead begins with is prepared first, then the word
//! is left where the agent finds it and reports it to the planner.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufReader, Read, Seek},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use flate2::read::MultiGzDecoder;
use nix::libc::{O_NOFOLLOW, O_NONBLOCK};

use super::remove::Brokers;
use api::Takeover;
use host::{
    Root,
    dumps::ID_KEY,
    files::{Owner, write_atomic},
    state, statedir, users,
};
use hostapi::{Refusal, TakeoverOrder};

const TAKEOVER: &str = "etc/takeover.json";
const MAX_ID_BYTES: u64 = 256;
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Two blocks of zeros end a tar archive.
const TAR_END: usize = 1024;

/// Prepares this host to lead. Killed anywhere, it is run again: nothing is done about it before the word is there.
///
/// # Errors
/// Where the lead's broker runs here or one that nobody knows, the dump is none or of another instance, or something can't
/// be written.
pub fn takeover(root: &Root, brokers: &dyn Brokers, order: &TakeoverOrder) -> Result<(), Refusal> {
    let _claimed = state::lock_claimed(root, &order.prefix)?;
    let prefix = root.path(&order.prefix);
    let view = brokers.observe(Some(&order.prefix));
    if let Some(unknown) = view.unknown {
        return Err(Refusal::new(format!("it may be the lead's, and have the queue: {unknown}")));
    }
    if let Some(dump) = &order.dump {
        if let Some(broker) = view.running.filter(|broker| broker.record.rank == 0) {
            return Err(Refusal::new(format!(
                "the lead's broker runs here as process {}: it has the queue",
                broker.pid
            )));
        }
        let owner = users::resolve_on(root, &order.run_as)?.owner();
        let instance_id = &order.takeover.instance_id;
        statedir::prepare_from_dump(&prefix, instance_id, owner, |path| {
            copy(&root.path(dump), path)?;
            let found = check(path).map_err(|why| Refusal::new(format!("{} {why}", dump.display())))?;
            match found {
                Some(id) if id == *instance_id => Ok(()),
                Some(id) => Err(Refusal::new(format!(
                    "{} is a dump of instance {id}, and the one that lacks its lead is {instance_id}",
                    dump.display()
                ))),
                None if order.unnamed => Ok(()),
                None => Err(Refusal::new(format!(
                    "{} does not say of which instance it is, as those of `flux-distribute dump` do; add --unnamed if you \
                     know that it is one of instance {instance_id}",
                    dump.display()
                ))),
            }
        })?;
    }
    let text = serde_json::to_vec(&order.takeover).map_err(|error| Refusal::new(error.to_string()))?;
    write_atomic(&prefix.join(TAKEOVER), &text, 0o644, Owner::ROOT)
}

/// The word that was left below `prefix`, as this process sees it.
pub fn read(prefix: &Path) -> Option<Takeover> {
    serde_json::from_slice(&fs::read(prefix.join(TAKEOVER)).ok()?).ok()
}

fn copy(from: &Path, to: &Path) -> Result<(), Refusal> {
    let cant_read = |error: io::Error| Refusal::io("read", from, &error);
    // Not to hang on what is no file at all.
    let mut source = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(from).map_err(cant_read)?;
    if !source.metadata().map_err(cant_read)?.is_file() {
        return Err(Refusal::new(format!("{} is not a file", from.display())));
    }
    let mut write = || -> io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).custom_flags(O_NOFOLLOW).open(to)?;
        io::copy(&mut source, &mut file)?;
        file.sync_all()
    };
    write().map_err(|error| Refusal::io("copy the dump to", to, &error))
}

/// Reads a dump to its end: it is whole, and it is Flux's. The instance that it names.
fn check(path: &Path) -> Result<Option<String>, String> {
    let broken = |error: io::Error| format!("can't be read to its end, it is not a whole dump: {error}");
    let mut file = File::open(path).map_err(broken)?;
    let mut magic = [0; 2];
    let is_gzip = file.read_exact(&mut magic).is_ok() && magic == GZIP;
    file.rewind().map_err(broken)?;
    let file = BufReader::new(file);
    let stream: Box<dyn Read> = if is_gzip { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
    let mut archive = tar::Archive::new(Tail { stream, last: Vec::new() });
    let (mut instance, mut is_flux) = (None, false);
    let named = PathBuf::from(ID_KEY.replace('.', "/"));
    for entry in archive.entries().map_err(broken)? {
        let entry = entry.map_err(broken)?;
        let path = entry.path().map_err(broken)?.into_owned();
        // What every instance has had since its first minute (flux-config-resource(5), RFC 16).
        is_flux = is_flux || path.starts_with("resource") || path.starts_with("job");
        if path == named {
            let mut text = String::new();
            entry.take(MAX_ID_BYTES).read_to_string(&mut text).map_err(broken)?;
            instance = Some(text.trim().to_owned());
        }
    }
    let mut tail = archive.into_inner();
    io::copy(&mut tail, &mut io::sink()).map_err(broken)?;
    match () {
        () if !tail.is_end() => Err("breaks off: it is not a whole dump".to_owned()),
        () if !is_flux => Err("is not a dump of a Flux instance".to_owned()),
        () => Ok(instance),
    }
}

/// Remembers the last that was read: a tar archive that was cut off between two entries looks whole but for its end.
struct Tail<R> {
    stream: R,
    last: Vec<u8>,
}

impl<R> Tail<R> {
    fn is_end(&self) -> bool {
        self.last.len() == TAR_END && self.last.iter().all(|byte| *byte == 0)
    }
}

impl<R: Read> Read for Tail<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.stream.read(buffer)?;
        let read = &buffer[length.saturating_sub(TAR_END)..length];
        self.last.drain(..(self.last.len() + read.len()).saturating_sub(TAR_END));
        self.last.extend_from_slice(read);
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};

    use super::*;

    fn archive(entries: &[(&str, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, content) in entries {
            let mut header = tar::Header::new_ustar();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, path, content.as_bytes()).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn checked(bytes: &[u8]) -> Result<Option<String>, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        check(file.path())
    }

    #[test]
    fn only_a_whole_dump_is_taken_and_it_tells_its_instance() {
        let jobs = "x".repeat(5000);
        let named = archive(&[("flux-distribute/instance-id", "4f-1"), ("resource/R", "{}"), ("job/1/J", &jobs)]);
        let unnamed = archive(&[("resource/R", "{}")]);
        let packed = gzip(&named);
        assert_eq!(checked(&named), Ok(Some("4f-1".to_owned())));
        assert_eq!(checked(&packed), Ok(Some("4f-1".to_owned())));
        assert_eq!(checked(&unnamed), Ok(None));
        assert!(checked(&archive(&[("etc/passwd", "root")])).unwrap_err().contains("not a dump of a Flux instance"));
        for cut in [&named[..1024], &named[..1536], &named[..4000], &named[..named.len() - 1024], &[], b"hello"] {
            assert!(checked(cut).is_err(), "{} bytes", cut.len());
        }
        for cut in 0..packed.len() {
            assert!(checked(&packed[..cut]).is_err(), "{cut} bytes");
        }
        let mut flipped = packed.clone();
        flipped[packed.len() / 2] ^= 1;
        assert!(checked(&flipped).is_err());
    }
}
