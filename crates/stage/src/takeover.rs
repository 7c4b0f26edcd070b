//! An administrator's request that this host's node become the lead. First the new lead's statedir is prepared, then
//! the request is written to a file, which the agent reads and reports to the planner.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufReader, Read, Seek},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use flate2::read::MultiGzDecoder;

use super::remove::Brokers;
use api::Takeover;
use base::error_chain;
use host::{
    Root,
    distrust::Distrust,
    dumps::ID_KEY,
    files::{Owner, write_atomic},
    state, statedir, trust, users,
};
use hostapi::{Refusal, TakeoverOrder};

const TAKEOVER: &str = "etc/takeover.json";
const MAX_ID_BYTES: u64 = 256;
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Bytes of the two zero blocks that end a tar archive.
const TAR_END: usize = 1024;

/// Prepares this host to lead. If it is killed, it can be run again: the planner does nothing before the request is
/// written.
///
/// # Errors
/// If the lead's broker or an unknown one runs here, the dump is damaged or of another instance, or a file can't be
/// written.
pub fn takeover(root: &Root, brokers: &dyn Brokers, order: &TakeoverOrder) -> Result<(), Refusal> {
    let _claimed = state::lock_claimed(root, &order.prefix)?;
    let prefix = root.path(&order.prefix);
    let view = brokers.observe(Some(&order.prefix));
    if let Some(unknown) = view.unknown {
        return Err(Refusal::new(format!("a broker runs here that may be the lead's and hold the queue: {unknown}")));
    }
    if let Some(dump) = &order.dump {
        if let Some(broker) = view.running.filter(|broker| broker.record.rank == 0) {
            return Err(Refusal::new(format!(
                "the lead's broker runs here as process {} and holds the queue: there is nothing to recover",
                broker.pid
            )));
        }
        let owner = users::resolve_on(root, &order.run_as)?.owner();
        let instance_id = &order.takeover.instance_id;
        statedir::prepare_from_dump(&prefix, instance_id, owner, |path| {
            copy(root, dump, path)?;
            match check(path).map_err(|error| Refusal::new(format!("{} {}", dump.display(), error_chain(&error))))? {
                Some(id) if id == *instance_id => Ok(()),
                Some(id) => Err(Refusal::new(format!(
                    "{} is a dump of instance {id}, but the instance without a lead is {instance_id}",
                    dump.display()
                ))),
                None if order.unnamed => Ok(()),
                None => Err(Refusal::new(format!(
                    "{} does not name its instance, as dumps of `flux-distribute dump` do; add --unnamed if you know \
                     that it is a dump of instance {instance_id}",
                    dump.display()
                ))),
            }
        })?;
    }
    if let Some(id) = &order.takeover.new_instance_id {
        let owner = users::resolve_on(root, &order.run_as)?.owner();
        statedir::check_owner(&prefix, id, owner)?;
    }
    let text = serde_json::to_vec(&order.takeover).map_err(|error| Refusal::new(error.to_string()))?;
    write_atomic(&prefix.join(TAKEOVER), &text, 0o644, Owner::ROOT)
}

/// The request that was written below `prefix` (this process's path).
pub fn read(prefix: &Path) -> Option<Takeover> {
    serde_json::from_slice(&fs::read(prefix.join(TAKEOVER)).ok()?).ok()
}

fn copy(root: &Root, from: &Path, to: &Path) -> Result<(), Refusal> {
    let mut source = trust::open_file(root, from).map_err(|distrust| {
        let problem = match distrust {
            Distrust::Kind { .. } => return Refusal::new(format!("can't read the dump: {}", distrust.problem())),
            Distrust::Io { source, .. } => return Refusal::io("read", from, &source),
            Distrust::Owner { .. } | Distrust::WritableByOthers { .. } | Distrust::Mounted { .. } => distrust.problem(),
        };
        // Whoever has written the dump decides which jobs run as the brokers' user.
        Refusal::new(format!(
            "{problem}. Only root may be able to write a dump, because its jobs will run: pass it on stdin with `--from -`"
        ))
    })?;
    let mut write = || -> io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(to)?;
        io::copy(&mut source, &mut file)?;
        file.sync_all()
    };
    write().map_err(|error| Refusal::io("copy the dump to", to, &error))
}

/// What is wrong with a dump, which is the subject of the messages.
#[derive(Debug, thiserror::Error)]
enum DumpError {
    #[error("can't be read to its end, so it is not a whole dump")]
    Read(#[source] io::Error),
    #[error("can't be read to its end, so it is not a whole dump")]
    Malformed,
    #[error("is truncated: it is not a whole dump")]
    Truncated,
    #[error("is not a dump of a Flux instance")]
    NotFlux,
}

impl From<io::Error> for DumpError {
    fn from(error: io::Error) -> Self {
        // What tar says quotes the file, which may be any file, with a key in it.
        if error.raw_os_error().is_some() { Self::Read(error) } else { Self::Malformed }
    }
}

/// Reads a whole dump and returns the instance ID in it, if there is one.
fn check(path: &Path) -> Result<Option<String>, DumpError> {
    let mut file = File::open(path)?;
    let mut magic = [0; 2];
    let is_gzip = file.read_exact(&mut magic).is_ok() && magic == GZIP;
    file.rewind()?;
    let file = BufReader::new(file);
    let stream: Box<dyn Read> = if is_gzip { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
    let mut archive = tar::Archive::new(Tail { stream, last: Vec::new() });
    let (mut instance, mut is_flux) = (None, false);
    let named = PathBuf::from(ID_KEY.replace('.', "/"));
    // Raw, because tar would hold a long name or an extended header in memory, and users name the keys of a KVS.
    for entry in archive.entries()?.raw(true) {
        let entry = entry?;
        let path = entry.path()?.into_owned();
        // Every instance has these keys from its first minute on (flux-config-resource(5), RFC 16).
        is_flux = is_flux || path.starts_with("resource") || path.starts_with("job");
        if path == named {
            let mut text = String::new();
            entry.take(MAX_ID_BYTES).read_to_string(&mut text)?;
            instance = Some(text.trim().to_owned());
        }
    }
    let mut tail = archive.into_inner();
    io::copy(&mut tail, &mut io::sink())?;
    match () {
        () if !tail.is_end() => Err(DumpError::Truncated),
        () if !is_flux => Err(DumpError::NotFlux),
        () => Ok(instance),
    }
}

/// Keeps the last bytes that were read: a tar archive that was cut between two entries lacks only its end marker.
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

    fn checked(bytes: &[u8]) -> Result<Option<String>, DumpError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        check(file.path())
    }

    #[test]
    fn no_message_quotes_what_is_not_a_dump() {
        let error = checked(&b"a secret key\n".repeat(100)).unwrap_err();
        assert!(!base::error_chain(&error).contains("secret"), "{error:?}");
        assert!(!format!("{error:?}").contains("secret"));
    }

    #[test]
    fn no_name_of_a_dump_is_read_that_could_fill_the_memory() {
        let long = "job/".to_owned() + &"x".repeat(300);
        let named = "flux-distribute/instance-id";
        assert_eq!(checked(&archive(&[(&long, "{}"), (named, "4f-1")])).unwrap(), Some("4f-1".to_owned()));
        // A header for a long name comes before the entry that it names.
        let mut builder = tar::Builder::new(Vec::new());
        for (kind, path, content) in
            [(tar::EntryType::GNULongName, "././@LongLink", named), (tar::EntryType::Regular, "resource/R", "4f-1")]
        {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_entry_type(kind);
            builder.append_data(&mut header, path, content.as_bytes()).unwrap();
        }
        assert_eq!(checked(&builder.into_inner().unwrap()).unwrap(), None);
    }

    #[test]
    fn only_a_whole_dump_is_accepted_and_its_instance_is_read() {
        let jobs = "x".repeat(5000);
        let named = archive(&[("flux-distribute/instance-id", "4f-1"), ("resource/R", "{}"), ("job/1/J", &jobs)]);
        let unnamed = archive(&[("resource/R", "{}")]);
        let packed = gzip(&named);
        assert_eq!(checked(&named).unwrap(), Some("4f-1".to_owned()));
        assert_eq!(checked(&packed).unwrap(), Some("4f-1".to_owned()));
        assert_eq!(checked(&unnamed).unwrap(), None);
        assert!(matches!(checked(&archive(&[("etc/passwd", "root")])), Err(DumpError::NotFlux)));
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
