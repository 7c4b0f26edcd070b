//! Checks whether an environment's Flux runs on this host. A bundle often relies on libraries and Python modules of the
//! machine it was built on, and a broker that lacks one dies before it can report that. So we ask the host's own loader
//! and its Python, as they will be asked when the broker starts, and name everything that is missing at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{ErrorKind, Read},
    path::{Path, PathBuf},
    process::Command,
};

use super::trial_user::{Ended, command, run};
use host::{child::is_of_another_architecture, opening::open_plain};
use hostapi::Refusal;

/// The programs that run on every node, relative to the environment.
const PROGRAMS: [&str; 3] = [FLUX, "libexec/flux/cmd/flux-broker", "libexec/flux/flux-shell"];
const FLUX: &str = "bin/flux";
/// The modules of the brokers that need libraries which no program needs, relative to [`LIBRARIES`].
const MODULES: [&str; 3] = [
    "flux/modules/content-sqlite.so",
    "flux/modules/sched-fluxion-resource.so",
    "flux/modules/sched-fluxion-qmanager.so",
];
const LIBRARIES: [&str; 2] = ["lib", "lib64"];
/// Where Flux has a wrapper script for each Python that it was built for, relative to the environment
/// (flux-python(1)). The script's name is `flux-pythonX.Y`.
const WRAPPERS: &str = "libexec/flux/cmd";
const WRAPPER: &str = "flux-python";
/// More than any wrapper has, in bytes.
const MAX_WRAPPER: u64 = 64 << 10;
/// The program that Python runs.
const QUESTION: &str = include_str!("trial.py");
/// Has the loader load a library beside those that a program asks for (ld.so(8)).
const PRELOAD: &str = "LD_PRELOAD";
/// Makes the loader list a program's libraries instead of starting it (ld.so(8)).
const TRACE: &str = "LD_TRACE_LOADED_OBJECTS";
/// What the loader says if a library is another one than a program was built with (ld.so(8)).
const WRONG_LIBRARY: &str = "symbol lookup error";
/// Characters of a program's message that are shown.
const LONGEST_MESSAGE: usize = 300;

/// The result of a trial that found no certain fault.
#[derive(Debug, PartialEq, Eq)]
pub enum Tried {
    /// It runs.
    Runs,
    /// The trial could not decide, for this reason.
    Unknown(String),
}

/// Tries the Flux of `environment`, which holds package set `digest`. `compiled_prefix` is the path that is
/// compiled into it, if that is another one; at this moment it may lead to another environment.
///
/// # Errors
/// If this host lacks libraries or Python modules (all are named in the message, with a remedy), or a program certainly
/// can't run on it.
pub fn try_flux(environment: &Path, digest: &str, compiled_prefix: Option<&Path>) -> Result<Tried, Refusal> {
    let mut trial = Trial { environment, compiled_prefix, lacking: BTreeMap::new(), unsure: None };
    trial
        .try_all()
        .map_err(|what| Refusal::new(format!("the Flux of package set {digest:.12} can't run on this host: {what}")))?;
    Ok(trial.unsure.map_or(Tried::Runs, Tried::Unknown))
}

/// A trial and what it has found.
struct Trial<'a> {
    environment: &'a Path,
    compiled_prefix: Option<&'a Path>,
    /// What this host lacks, and for which files of the environment.
    lacking: BTreeMap<String, BTreeSet<String>>,
    /// Why the trial can't decide.
    unsure: Option<String>,
}

impl Trial<'_> {
    /// Tries everything; a certain fault is the error.
    fn try_all(&mut self) -> Result<(), String> {
        let flux = self.environment.join(FLUX);
        for name in PROGRAMS {
            let program = self.environment.join(name);
            if is_elf(&program) {
                self.trace(name, &program, None)?;
            }
        }
        for name in LIBRARIES.iter().flat_map(|lib| MODULES.map(|module| format!("{lib}/{module}"))) {
            let module = self.environment.join(&name);
            if is_elf(&flux) && is_elf(&module) {
                self.trace(&name, &flux, Some(&module))?;
            }
        }
        if let Some(python) = python(self.environment).filter(|python| !self.is_of_a_set(&python.interpreter)) {
            for name in python.directories().map(|directory| directory.join("_flux/_core.so")) {
                let module = self.environment.join(&name);
                if is_elf(&python.interpreter) && is_elf(&module) {
                    self.trace(&name.to_string_lossy(), &python.interpreter, Some(&module))?;
                }
            }
            self.ask_python(&python);
        }
        if !self.lacking.is_empty() {
            let named = self.lacking.iter().map(|(what, by)| {
                let by: Vec<_> = by.iter().map(String::as_str).collect();
                format!("{what} (for {})", by.join(" and "))
            });
            return Err(format!(
                "it lacks {}; install what is missing on the hosts, or use a bundle that was made on their \
                 distribution, or a channel",
                named.collect::<Vec<_>>().join(", ")
            ));
        }
        if self.unsure.is_none() && is_elf(&flux) { self.start(&flux) } else { Ok(()) }
    }

    /// Has the loader list the libraries of `program`, or those of `module` in it, and notes what it doesn't find.
    /// `name` is the file's path in the environment.
    fn trace(&mut self, name: &str, program: &Path, module: Option<&Path>) -> Result<(), String> {
        let mut command = command(program);
        // A program whose loader does not list them starts, and ends at once.
        command.arg("--help").env(TRACE, "1");
        self.lead_to_environment(&mut command);
        if let Some(module) = module {
            command.env(PRELOAD, module);
        }
        match run(command) {
            Ok(Ended::Exited { text, .. }) => {
                for library in missing(&text) {
                    if is_within(self.environment, &library) {
                        self.unsure =
                            Some(format!("{library} is in the package set, but its loader does not find it yet"));
                        continue;
                    }
                    let files = self.lacking.entry(library).or_default();
                    // The list for a module repeats what the program lacks that loads it.
                    if module.is_none() || !files.contains(FLUX) {
                        files.insert(name.to_owned());
                    }
                }
            }
            Ok(Ended::Inconclusive(how)) => self.unsure = Some(format!("{name} {how}")),
            Err(error) if is_of_another_architecture(&error) => {
                return Err(format!("{name} is built for another architecture; use a package set for this one"));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(format!(
                    "the loader of {name} does not exist on this host; use a bundle or a channel for this host's C \
                     library"
                ));
            }
            Err(error) => self.unsure = Some(format!("{name} can't be started: {error}")),
        }
        Ok(())
    }

    /// Asks the Python that Flux was built for which modules it has, and notes what it lacks.
    fn ask_python(&mut self, python: &Python) {
        let Python { version, interpreter } = python;
        let mut command = command(interpreter);
        command.args(["-I", "-B", "-c", QUESTION]);
        command.args(python.directories().map(|directory| self.environment.join(directory).join("flux")));
        let by = interpreter.display().to_string();
        match run(command) {
            Ok(Ended::Exited { code: 0, text }) => {
                let words = |what: &str| text.lines().filter_map(|line| line.strip_prefix(what)).collect::<Vec<_>>();
                if let Some(why) = words("fails ").first() {
                    let why: String = why.chars().take(LONGEST_MESSAGE).collect();
                    self.unsure = Some(format!("{by} can't import a module that Flux needs: {why}"));
                }
                if let Some(other) = words("version ").first().filter(|has| *has != version) {
                    self.unsure = Some(format!("{by} is Python {other}, and this Flux was built for Python {version}"));
                }
                for name in words("lacks ").into_iter().filter(|name| name.chars().all(|c| c.is_ascii_alphanumeric())) {
                    self.lacking.entry(format!("Python's module {name}")).or_default().insert(by.clone());
                }
            }
            Ok(Ended::Exited { code, text }) => {
                self.unsure = Some(format!("{by} ended with code {code}: {}", last_line(&text)));
            }
            Ok(Ended::Inconclusive(how)) => self.unsure = Some(format!("{by} {how}")),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.lacking.entry(by).or_default().insert("Flux's commands".to_owned());
            }
            Err(error) => self.unsure = Some(format!("{by} can't be started: {error}")),
        }
    }

    /// Starts Flux, which ends at once.
    fn start(&mut self, flux: &Path) -> Result<(), String> {
        let mut command = command(flux);
        command.arg("--version");
        self.lead_to_environment(&mut command);
        match run(command) {
            Ok(Ended::Exited { code: 0, .. }) => {}
            // Libraries of another environment, which the compiled prefix leads to.
            Ok(Ended::Exited { text, .. }) if self.compiled_prefix.is_some() && text.contains(WRONG_LIBRARY) => {
                self.unsure = Some(format!("`flux --version` can't be tried yet: {}", last_line(&text)));
            }
            Ok(Ended::Exited { code, text }) => {
                return Err(format!("`flux --version` ended with code {code}: {}", last_line(&text)));
            }
            Ok(Ended::Inconclusive(how)) => self.unsure = Some(format!("`flux --version` {how}")),
            Err(error) => self.unsure = Some(format!("`flux --version` can't be started: {error}")),
        }
        Ok(())
    }

    /// True for what is below the compiled prefix: until that leads here, it belongs to another environment, or does not exist.
    fn is_of_a_set(&self, path: &Path) -> bool {
        self.compiled_prefix.is_some_and(|prefix| path.starts_with(prefix))
    }

    /// Has `command` find the libraries of the environment, although the compiled prefix does not lead there yet.
    fn lead_to_environment(&self, command: &mut Command) {
        if self.compiled_prefix.is_some() {
            let [lib, lib64] = LIBRARIES.map(|name| self.environment.join(name));
            command.env("LD_LIBRARY_PATH", format!("{}:{}", lib.display(), lib64.display()));
        }
    }
}

/// The Python of a Flux.
#[derive(Debug, PartialEq, Eq)]
struct Python {
    /// Such as `3.11`.
    version: String,
    /// An absolute path on the host.
    interpreter: PathBuf,
}

impl Python {
    /// Where Flux's modules may be, relative to the environment.
    fn directories(&self) -> impl Iterator<Item = PathBuf> {
        let name = format!("python{}", self.version);
        let below = [Path::new("flux").join(&name), Path::new(&name).join("site-packages")];
        LIBRARIES.into_iter().flat_map(move |lib| below.clone().map(|path| Path::new(lib).join(path)))
    }
}

/// The Python that the Flux in `environment` was built for, as its wrapper script names it. None if there is no wrapper
/// of the usual form, which ends with `exec INTERPRETER "$@"`. Of several wrappers any will do: each has its modules.
fn python(environment: &Path) -> Option<Python> {
    let entries = fs::read_dir(environment.join(WRAPPERS)).ok()?.flatten();
    let mut found = entries.filter_map(|entry| {
        let (path, name) = (entry.path(), entry.file_name());
        let version = name.to_str()?.strip_prefix(WRAPPER)?;
        if !version.starts_with(|first: char| first.is_ascii_digit()) || !path.is_file() {
            return None;
        }
        let mut text = String::new();
        // A symlink of the package may lead to what a user of the host has made a pipe meanwhile.
        open_plain(&path).ok()?.take(MAX_WRAPPER).read_to_string(&mut text).ok()?;
        let words = text.lines().rev().find_map(|line| line.trim().strip_prefix("exec "))?;
        let interpreter = PathBuf::from(words.split_whitespace().next()?);
        interpreter.is_absolute().then(|| Python { version: version.to_owned(), interpreter })
    });
    found.next()
}

/// The last words of a program.
fn last_line(text: &str) -> String {
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
    last.trim().chars().take(LONGEST_MESSAGE).collect()
}

/// True for an ELF file. Scripts are not tried: they have no libraries, and running them could do anything.
fn is_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    // A symlink of the package may lead to a device of the host, which is not even opened.
    path.is_file() && open_plain(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"\x7fELF"
}

/// The libraries and versions that the loader did not find, from its list: `libx.so.1 => not found`, and
/// ``/lib/libc.so.6: version `GLIBC_2.38' not found (required by flux)``.
fn missing(list: &str) -> BTreeSet<String> {
    let of_line = |line: &str| {
        if let Some(name) = line.trim().strip_suffix("=> not found") {
            return Some(name.trim().to_owned());
        }
        let (before, after) = line.split_once("version `")?;
        let (version, rest) = after.split_once('\'')?;
        let library = Path::new(before.trim().trim_end_matches(':').rsplit(": ").next()?).file_name()?;
        rest.starts_with(" not found").then(|| format!("{version} of {}", library.to_string_lossy()))
    };
    list.lines().filter_map(of_line).collect()
}

/// True if a file with this name is somewhere below `directory`.
fn is_within(directory: &Path, name: &str) -> bool {
    fs::read_dir(directory).into_iter().flatten().flatten().any(|entry| {
        entry.file_name() == name || entry.file_type().is_ok_and(|kind| kind.is_dir()) && is_within(&entry.path(), name)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::needs::{Need, flux_prefix, skips_without};

    #[test]
    fn libraries_that_the_loader_does_not_find_are_read_from_its_list() {
        let list = "\tlinux-vdso.so.1 (0x7f)\n\tlibarchive.so.13 => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n\
                    bin/flux: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.99' not found (required by bin/flux)\n\
                    \tlibarchive.so.13 => not found\n";
        assert_eq!(Vec::from_iter(missing(list)), ["GLIBC_2.99 of libc.so.6", "libarchive.so.13"]);
        assert!(missing("\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n").is_empty());
    }

    /// The smallest program possible, with a single instruction that no processor has.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_program_for_a_newer_processor_is_refused() {
        if skips_without([Need::Root]) {
            return;
        }
        let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
        let program = [
            b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec(),
            words(&[
                0x40_0078,
                64,
                0,
                0x38_0040_0000_0000,
                1,
                0x5_0000_0001,
                0,
                0x40_0000,
                0x40_0000,
                0x7a,
                0x7a,
                0x1000,
            ]),
            b"\x0f\x0b".to_vec(),
        ]
        .concat();
        let environment = tempfile::tempdir().unwrap();
        fs::set_permissions(environment.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(environment.path().join("bin")).unwrap();
        let flux = environment.path().join("bin/flux");
        fs::write(&flux, program).unwrap();
        fs::set_permissions(&flux, fs::Permissions::from_mode(0o755)).unwrap();
        let refusal = try_flux(environment.path(), "digest", None).unwrap_err();
        assert!(refusal.message.contains("it is built for a newer processor"), "{refusal}");
        assert!(!refusal.transient);
    }

    /// A signal kills a truncated program, in the kernel or in the loader.
    #[test]
    fn a_program_that_a_signal_kills_is_not_reported_as_unable_to_run() {
        if skips_without([Need::Root]) {
            return;
        }
        let environment = tempfile::tempdir().unwrap();
        // The trial runs as another user than root, who must be able to read it.
        fs::set_permissions(environment.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let flux = environment.path().join("bin/flux");
        fs::create_dir(environment.path().join("bin")).unwrap();
        fs::copy("/bin/sleep", &flux).unwrap();
        fs::File::options().write(true).open(&flux).unwrap().set_len(4096).unwrap();
        let tried = try_flux(environment.path(), "digest", None).unwrap();
        assert!(matches!(&tried, Tried::Unknown(why) if why.contains("bin/flux was killed by signal ")), "{tried:?}");
    }

    /// An environment that holds only a wrapper of Python `interpreter` and one of Flux's Python sources.
    fn environment_with_python(interpreter: &Path) -> tempfile::TempDir {
        let environment = tempfile::tempdir().unwrap();
        let sources = "lib/flux/python3.11/flux";
        for directory in ["", WRAPPERS, sources] {
            let path = environment.path().join(directory);
            fs::create_dir_all(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::write(environment.path().join(sources).join("a.py"), "from _flux._core import lib\nimport yaml\n").unwrap();
        let wrapper = format!("#!/bin/sh\nif test \"$1\"; then\n  exit\nfi\nexec {} \"$@\"\n", interpreter.display());
        fs::write(environment.path().join(WRAPPERS).join("flux-python3.11"), wrapper).unwrap();
        environment
    }

    fn script(directory: &Path, lines: &str) -> PathBuf {
        let path = directory.join("python");
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(&path, format!("#!/bin/sh\n{lines}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn all_that_python_lacks_is_named_at_once() {
        if skips_without([Need::Root]) {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let python = script(directory.path(), "echo lacks yaml; echo lacks cffi; echo 'lacks a\u{1b}[m name'");
        let environment = environment_with_python(&python);
        let refusal = try_flux(environment.path(), "digest", None).unwrap_err().to_string();
        for module in ["cffi", "yaml"] {
            assert!(refusal.contains(&format!("Python's module {module} (for {})", python.display())), "{refusal}");
        }
        assert!(!refusal.contains('\u{1b}'), "{refusal}");
    }

    #[test]
    fn a_python_that_does_not_exist_is_named() {
        if skips_without([Need::Root]) {
            return;
        }
        let environment = environment_with_python(Path::new("/nowhere/python3.11"));
        let refusal = try_flux(environment.path(), "digest", None).unwrap_err().to_string();
        assert!(refusal.contains("it lacks /nowhere/python3.11 (for Flux's commands)"), "{refusal}");
        // It may be in the package set, and be there once the compiled prefix leads to this environment.
        assert_eq!(try_flux(environment.path(), "digest", Some(Path::new("/nowhere"))).unwrap(), Tried::Runs);
    }

    #[test]
    fn what_python_can_not_import_for_another_reason_is_no_reason_to_refuse() {
        if skips_without([Need::Root]) {
            return;
        }
        for (lines, words) in [
            ("echo fails yaml: not readable", "can't import a module that Flux needs: yaml: not readable"),
            ("echo version 3.13", "is Python 3.13, and this Flux was built for Python 3.11"),
            ("echo lacks yaml; echo no libpython >&2; exit 127", "ended with code 127: no libpython"),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let python = script(directory.path(), lines);
            let tried = try_flux(environment_with_python(&python).path(), "digest", None).unwrap();
            assert!(matches!(&tried, Tried::Unknown(why) if why.ends_with(words)), "{tried:?}");
        }
    }

    #[test]
    fn flux_is_tried_with_its_modules_and_its_python() {
        if skips_without([Need::Root, Need::Flux]) {
            return;
        }
        let flux = flux_prefix();
        assert_eq!(try_flux(&flux, "digest", None).unwrap(), Tried::Runs);
        for module in MODULES {
            assert!(is_elf(&flux.join("lib").join(module)), "{module} has another name now");
        }
        // The same Flux, on a host whose Python has only what comes with Python.
        let of_flux = super::python(&flux).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let python = script(directory.path(), &format!("exec {} -S \"$@\"", of_flux.interpreter.display()));
        let environment = environment_with_python(&python);
        fs::remove_dir_all(environment.path().join("lib")).unwrap();
        std::os::unix::fs::symlink(flux.join("lib"), environment.path().join("lib")).unwrap();
        let wrappers = environment.path().join(WRAPPERS);
        let name = format!("flux-python{}", of_flux.version);
        fs::rename(wrappers.join("flux-python3.11"), wrappers.join(name)).unwrap();
        let refusal = try_flux(environment.path(), "digest", None).unwrap_err().to_string();
        for module in ["cffi", "ply", "yaml"] {
            assert!(refusal.contains(&format!("Python's module {module} ")), "{refusal}");
        }
    }

    #[test]
    fn scripts_are_not_run() {
        let environment = tempfile::tempdir().unwrap();
        fs::create_dir(environment.path().join("bin")).unwrap();
        fs::write(environment.path().join("bin/flux"), "#!/bin/sh\nexit 1\n").unwrap();
        assert_eq!(try_flux(environment.path(), "digest", None).unwrap(), Tried::Runs);
    }
}
