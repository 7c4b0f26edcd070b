//! Damaged files are repaired while processes use them.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    io::{Read, Seek},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, symlink},
    },
    time::Duration,
};

use host::{HostLock, Root};
use hostapi::{CollectOrder, Slice, VerifyOrder};
use stage::launch::HostPlaces;

use super::{verify::verify, *};

/// Two packages besides Flux; one has symlinks and a library with a compiled-in prefix.
async fn installed() -> (Host, PackageSet, Channel) {
    let mut channel = Channel::with_flux();
    channel.add(
        "one",
        ".conda",
        &[],
        &[
            Content::script("bin/one", "#!PREFIX/sh"),
            Content::plain("share/deep/er/file", b"deep"),
            Content::link("lib/libone.so", "libflux.so"),
        ],
    );
    let set = resolve(&asked(&channel.file_url(), &["flux-core", "one"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    host.link(&set).await.unwrap();
    (host, set, channel)
}

fn link_order(host: &Host, set: &PackageSet) -> LinkOrder {
    LinkOrder {
        prefix: host.prefix().to_owned(),
        digest: set.digest(),
        set: set.clone(),
        platform: PLATFORM.to_owned(),
        follow: false,
    }
}

async fn mend(host: &Host, set: &PackageSet) -> Result<hostapi::Mended, Refusal> {
    mend_while(host, set, |_| ()).await
}

async fn mend_while(
    host: &Host,
    set: &PackageSet,
    mut progress: impl FnMut(Progress) + Send + 'static,
) -> Result<hostapi::Mended, Refusal> {
    let order = link_order(host, set);
    tokio::task::spawn_blocking(move || packages::mend(&order, &HostPlaces::of_host(), &mut progress)).await.unwrap()
}

/// What an agent orders that keeps all environments.
fn collect_nothing(prefix: &Path, digest: &str) -> CollectOrder {
    CollectOrder {
        prefix: prefix.to_owned(),
        keep: 9,
        wanted: [digest.to_owned()].into(),
        archives: fs::read_dir(prefix.join("pkgs"))
            .unwrap()
            .map(|one| one.unwrap().file_name().into_string().unwrap())
            .collect(),
        is_queue_up: false,
    }
}

fn named(differences: &[hostapi::Difference]) -> Vec<String> {
    differences.iter().map(ToString::to_string).collect()
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    bytes[7] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[tokio::test]
async fn damage_is_repaired_and_a_process_keeps_the_file_it_has_open() {
    let (host, set, _channel) = installed().await;
    let at = |path: &str| host.environment(&set).join(path);
    let inode = |path: &str| fs::symlink_metadata(at(path)).unwrap().ino();
    let library = fs::read(at("lib/libflux.so")).unwrap();

    flip(&at("lib/libflux.so"));
    let damaged = fs::read(at("lib/libflux.so")).unwrap();
    let mut open = File::open(at("lib/libflux.so")).unwrap();
    fs::remove_file(at("share/flux")).unwrap();
    fs::set_permissions(at("bin/flux"), fs::Permissions::from_mode(0o4755)).unwrap();
    fs::set_permissions(at("share/deep"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::remove_file(at("lib/libone.so")).unwrap();
    symlink("/etc/passwd", at("lib/libone.so")).unwrap();
    fs::remove_file(at("bin/one")).unwrap();
    fs::create_dir_all(at("bin/one/in/the/way")).unwrap();
    fs::write(at("share/mine"), "mine").unwrap();
    let (touched, whole) = (inode("lib/libflux.so"), inode("share/big"));

    let mended = mend(&host, &set).await.unwrap();
    let expected = [
        "mode bin/flux",
        "replaced bin/one",
        "changed lib/libflux.so",
        "changed lib/libone.so",
        "mode share/deep",
        "missing share/flux",
    ];
    assert_eq!(named(&mended.mended), expected);
    assert_eq!(named(&mended.left), ["extra share/mine"]);
    assert_eq!(named(&verify(host.prefix(), &set.digest()).differences), ["extra share/mine"]);
    assert_eq!(fs::read(at("lib/libflux.so")).unwrap(), library);
    let mut kept = Vec::new();
    open.rewind().unwrap();
    open.read_to_end(&mut kept).unwrap();
    assert_eq!(kept, damaged, "no file is written in place");
    assert_ne!(inode("lib/libflux.so"), touched);
    assert_eq!(inode("share/big"), whole, "what is whole is not touched");
    assert_eq!(host.envs(), [set.digest()], "nothing is left beside it");
    assert_eq!(mend(&host, &set).await.unwrap().mended, []);
}

/// Versions before this one took over permissions as packages had them.
#[tokio::test]
async fn files_that_an_older_version_left_writable_are_reported_and_closed() {
    let (host, set, _channel) = installed().await;
    let at = |path: &str| host.environment(&set).join(path);
    // In its place, root's own group may write as the package has it: it has no other member.
    let open = [("share", 0o777), ("share/big", 0o666), ("bin/flux", 0o775)];
    let records = at(".flux-distribute.records.json");
    let mut recorded: serde_json::Value = serde_json::from_slice(&fs::read(&records).unwrap()).unwrap();
    for (path, mode) in open {
        fs::set_permissions(at(path), fs::Permissions::from_mode(mode)).unwrap();
        recorded["modes"][path] = mode.into();
    }
    fs::write(&records, recorded.to_string()).unwrap();

    // Who has opened a file while it was open can write to it for ever.
    let mut held = fs::OpenOptions::new().write(true).open(at("share/big")).unwrap();
    let big = fs::read(at("share/big")).unwrap();
    // A user can give a file of root another name in a directory that is open.
    fs::write(at("share/usercustomize.py"), "evil").unwrap();
    let told = ["mode share", "mode share/big", "extra share/usercustomize.py"];
    assert_eq!(named(&verify(host.prefix(), &set.digest()).differences), told);
    let mode = |path: &str| fs::metadata(at(path)).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode("share"), mode("share/big")), (0o755, 0o644), "a look closes what it finds open");
    assert_eq!(packages::ready(host.prefix()), [set.digest()], "it is used until then");
    assert_eq!(named(&verify(host.prefix(), &set.digest()).differences), told, "until all is replaced");
    let mended = mend(&host, &set).await.unwrap();
    let told = [
        "changed .flux-distribute.records.json",
        "mode bin/flux",
        "mode share",
        "mode share/big",
        "extra share/usercustomize.py",
    ];
    assert_eq!((named(&mended.mended), mended.left), (told.map(str::to_owned).to_vec(), vec![]));
    std::io::Write::write_all(&mut held, b"evil").unwrap();
    assert_eq!(fs::read(at("share/big")).unwrap(), big);
    assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
    for (path, closed) in [("share", 0o755), ("share/big", 0o644), ("bin/flux", 0o755)] {
        assert_eq!(mode(path), closed, "{path}");
    }
}

/// Python runs a `*.pth` and a sitecustomize.py, and the broker the scripts in rc1.d, as root.
#[tokio::test]
async fn what_a_user_planted_while_an_environment_was_open_is_removed() {
    if skips_without([Need::Root]) {
        return;
    }
    let (host, set, _channel) = installed().await;
    let at = |path: &str| host.environment(&set).join(path);
    let users = |path: &str| std::os::unix::fs::lchown(at(path), Some(500), Some(500)).unwrap();
    fs::set_permissions(at("share"), fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(at("share/sitecustomize.py"), "evil").unwrap();
    symlink("/tmp/evil", at("share/evil.so")).unwrap();
    fs::create_dir_all(at("share/rc1.d/deep")).unwrap();
    fs::write(at("share/rc1.d/deep/evil"), "evil").unwrap();
    nix::unistd::mkfifo(&at("share/pipe"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let evil = at("share").join(OsStr::from_bytes(b"evil\xff.pth"));
    fs::write(&evil, "evil").unwrap();
    std::os::unix::fs::chown(&evil, Some(500), Some(500)).unwrap();
    for path in ["share/sitecustomize.py", "share/evil.so", "share/rc1.d", "share/pipe"] {
        users(path);
    }
    fs::write(at("share/roots"), "an administrator's").unwrap();

    let strangers = [
        "owner share/evil.so",
        "owner share/evil\u{fffd}.pth",
        "owner share/pipe",
        "owner share/rc1.d",
        "owner share/sitecustomize.py",
    ];
    let told = named(&verify(host.prefix(), &set.digest()).differences);
    let expected = ["mode share", "extra share/roots"].into_iter().chain(strangers).map(str::to_owned);
    let expected: BTreeSet<_> = expected.collect();
    assert_eq!(told.into_iter().collect::<BTreeSet<_>>(), expected);
    // What root owns may have got its place from a user, too.
    let mended = mend(&host, &set).await.unwrap();
    assert_eq!((named(&mended.mended).into_iter().collect::<BTreeSet<_>>(), mended.left), (expected, vec![]));
    assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
    assert!(!evil.exists() && fs::symlink_metadata(at("share/evil.so")).is_err());
}

/// Mounts a FUSE file system whose root has this type, as a user's program does. Nobody serves it, and root may ask it: whoever does
/// waits.
fn mount_as_user(point: &Path, root: u32) -> fs::File {
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&device);
    let options = format!("fd={fd},rootmode={root:o},user_id=500,group_id=500,allow_other");
    nix::mount::mount(Some("theirs"), point, Some("fuse"), nix::mount::MsFlags::MS_NOSUID, Some(&*options)).unwrap();
    device
}

/// Where a user could write once, that user may mount a file system by FUSE, which answers when it likes.
#[tokio::test]
async fn a_file_system_that_a_user_mounted_in_an_open_environment_keeps_nothing_else_open() {
    if skips_without([Need::Fuse]) {
        return;
    }
    let (host, set, _channel) = installed().await;
    let at = |path: &str| host.environment(&set).join(path);
    for path in ["bin", "share"] {
        fs::set_permissions(at(path), fs::Permissions::from_mode(0o777)).unwrap();
    }
    for (point, root) in [("lib/theirs", 0o40000), ("share/theirs", 0o100_000)] {
        match root {
            0o40000 => fs::create_dir(at(point)).unwrap(),
            _ => fs::write(at(point), "").unwrap(),
        }
        std::mem::forget(mount_as_user(&at(point), root));
    }
    let told = ["mode bin", "unreadable lib/theirs", "mode share", "unreadable share/theirs"];
    assert_eq!(named(&verify(host.prefix(), &set.digest()).differences), told);
    for path in ["bin", "share"] {
        assert_eq!(fs::metadata(at(path)).unwrap().permissions().mode() & 0o7777, 0o755, "{path}");
    }
    let mended = mend(&host, &set).await.unwrap();
    assert_eq!(mended.left, []);
    assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(host.prefix().to_str().unwrap()), "{mounts}");
}

/// Where an older version left the top of an environment open, a user may mount over all of it.
#[tokio::test]
async fn an_environment_over_which_a_user_mounted_a_file_system_is_built_again() {
    if skips_without([Need::Fuse]) {
        return;
    }
    let (host, set, _channel) = installed().await;
    let environment = host.environment(&set);
    std::mem::forget(mount_as_user(&environment, 0o40000));
    let is_mounted = || fs::read_to_string("/proc/self/mounts").unwrap().contains(host.prefix().to_str().unwrap());
    host.link(&set).await.unwrap();
    assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
    assert!(!is_mounted());

    // An installation does not replace one that is in use. A repair does.
    std::mem::forget(mount_as_user(&environment, 0o40000));
    assert_eq!(named(&verify(host.prefix(), &set.digest()).differences), ["unreadable "]);
    assert_eq!(mend(&host, &set).await.unwrap().left, []);
    assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
    assert!(!is_mounted());
}

/// What a user mounted in a directory that somebody gave to that user can't be replaced in place.
#[tokio::test]
async fn an_environment_in_which_a_user_has_mounted_a_file_system_is_replaced_as_a_whole() {
    if skips_without([Need::Fuse]) {
        return;
    }
    let (host, set, _channel) = installed().await;
    let at = |path: &str| host.environment(&set).join(path);
    let is_mounted = || fs::read_to_string("/proc/self/mounts").unwrap().contains(host.prefix().to_str().unwrap());
    for (path, mode, root) in [("lib", 0o755, 0o40000), ("share", 0o777, 0o40000), ("share/big", 0o666, 0o100_000)] {
        if mode == 0o755 {
            std::os::unix::fs::chown(at(path), Some(500), Some(500)).unwrap();
        }
        fs::set_permissions(at(path), fs::Permissions::from_mode(mode)).unwrap();
        std::mem::forget(mount_as_user(&at(path), root));
        assert_ne!(verify(host.prefix(), &set.digest()).differences, [], "{path}");
        assert_eq!(mend(&host, &set).await.unwrap().left, [], "{path}");
        assert_eq!(verify(host.prefix(), &set.digest()).differences, [], "{path}");
        assert!(!is_mounted(), "{path}");
    }
}

/// Whoever owns a file can have the kernel ask them before anybody else opens it, for 45 s.
#[tokio::test]
async fn no_look_waits_for_a_lease_that_a_user_has_on_a_file() {
    if skips_without([Need::Root]) {
        return;
    }
    let (host, set, _channel) = installed().await;
    let theirs = host.environment(&set).join("conda-meta/theirs.json");
    fs::write(&theirs, "{}").unwrap();
    std::os::unix::fs::chown(&theirs, Some(500), Some(500)).unwrap();
    let lease = "import fcntl, os, signal, sys; signal.signal(signal.SIGIO, signal.SIG_IGN); \
        fcntl.fcntl(os.open(sys.argv[1], os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK); print(flush=True); sys.stdin.read()";
    let mut holder = std::process::Command::new("python3");
    holder.args(["-c", lease]).arg(&theirs).stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut holder = holder.spawn().unwrap();
    let mut told = [0];
    holder.stdout.take().unwrap().read_exact(&mut told).unwrap();
    let (prefix, digest) = (host.prefix().to_owned(), set.digest());
    let looking = tokio::task::spawn_blocking(move || named(&verify(&prefix, &digest).differences));
    // The kernel ends a lease after 45 s (/proc/sys/fs/lease-break-time).
    let differences = tokio::time::timeout(Duration::from_secs(30), looking).await;
    drop(holder.stdin.take());
    holder.wait().unwrap();
    assert!(differences.unwrap().unwrap().contains(&"owner conda-meta/theirs.json".to_owned()));
}

/// Jobs go on with the files that they have; what no package has is gone from under the environment's name.
#[tokio::test]
async fn an_open_environment_is_replaced_beside_the_process_that_uses_it() {
    let (host, set, _channel) = installed().await;
    let at = |path: &str| host.environment(&set).join(path);
    let envs = host.prefix().join("envs");
    let set_aside = || {
        fs::read_dir(&envs)
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|end| end == "replaced"))
            .count()
    };
    fs::copy("/bin/sleep", at("share/sleep")).unwrap();
    fs::set_permissions(at("share"), fs::Permissions::from_mode(0o777)).unwrap();
    verify(host.prefix(), &set.digest());
    let mut job = std::process::Command::new(at("share/sleep")).arg("600").spawn().unwrap();
    mend(&host, &set).await.unwrap();
    assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
    assert!(!at("share/sleep").exists());
    assert_eq!(set_aside(), 1);
    assert!(job.try_wait().unwrap().is_none());
    // Not even if its name becomes free: others could write to it.
    fs::remove_dir_all(host.environment(&set)).unwrap();
    packages::collect(&collect_nothing(host.prefix(), &set.digest()), &HostPlaces::of_host()).unwrap();
    assert_eq!((set_aside(), host.environment(&set).exists()), (1, false));
    job.kill().unwrap();
    job.wait().unwrap();
    host.link(&set).await.unwrap();
    let digest = set.digest();
    packages::collect(&collect_nothing(host.prefix(), &digest), &HostPlaces::of_host()).unwrap();
    assert_eq!(set_aside(), 0);
}

#[tokio::test]
async fn no_look_waits_for_a_pipe_or_follows_a_link_that_a_user_planted() {
    let (host, set, _channel) = installed().await;
    let at = |path: &str| host.environment(&set).join(path);
    let (prefix, digest) = (host.prefix().to_owned(), set.digest());
    let look = async |what: &str| {
        let (prefix, digest) = (prefix.clone(), digest.clone());
        let looking = tokio::task::spawn_blocking(move || (packages::ready(&prefix), verify(&prefix, &digest)));
        let Ok(looked) = tokio::time::timeout(Duration::from_mins(1), looking).await else {
            // The runtime would wait for the thread.
            eprintln!("the look waits for {what}");
            std::process::exit(1);
        };
        looked.unwrap()
    };
    let names =
        [packages::ENVIRONMENT_MARKER, ".flux-distribute.records.json", "conda-meta/one-1.0-0.json", "share/big"];
    let outside = tempfile::tempdir().unwrap();
    for name in names {
        let (kept, is_ready) = (outside.path().join("kept"), name != packages::ENVIRONMENT_MARKER);
        fs::rename(at(name), &kept).unwrap();
        nix::unistd::mkfifo(&at(name), nix::sys::stat::Mode::all()).unwrap();
        let (ready, looked) = look(name).await;
        assert_eq!(ready.len(), usize::from(is_ready), "a pipe at {name}");
        assert!(named(&looked.differences).iter().any(|difference| difference.ends_with(name)), "{name}: {looked:?}");
        fs::remove_file(at(name)).unwrap();
        // The right content, but wherever the link leads tomorrow.
        symlink(&kept, at(name)).unwrap();
        let (ready, looked) = look(name).await;
        assert_eq!(ready.len(), usize::from(is_ready), "a link at {name}");
        assert!(named(&looked.differences).iter().any(|difference| difference.ends_with(name)), "{name}: {looked:?}");
        mend(&host, &set).await.unwrap();
        assert_eq!(verify(&prefix, &digest).differences, [], "{name}");
        fs::remove_file(&kept).unwrap();
    }
}

/// An agent that starts a broker takes the host's lock; one that installs another set takes that of `envs/`, too.
#[tokio::test]
async fn a_repair_delays_neither_an_installation_nor_a_broker() {
    let (host, set, mut channel) = installed().await;
    channel.add("two", ".conda", &[], &[Content::plain("share/two", b"two")]);
    let other = resolve(&asked(&channel.file_url(), &["flux-core", "two"])).await.unwrap();
    host.fetch(&other).await.unwrap();
    flip(&host.environment(&set).join("lib/libflux.so"));

    let (prefix, second) = (host.prefix().to_owned(), link_order(&host, &other));
    let mut tried = BTreeSet::new();
    let beside = move |now: Progress| {
        if tried.insert(now.what.clone()) {
            HostLock::take(&Root::host(), &prefix, Duration::ZERO).unwrap();
            packages::link(&second, &HostPlaces::of_host(), &mut |_| ()).unwrap();
            packages::collect(&collect_nothing(&prefix, &second.digest), &HostPlaces::of_host()).unwrap();
        }
    };
    assert_eq!(named(&mend_while(&host, &set, beside).await.unwrap().mended), ["changed lib/libflux.so"]);
    for set in [&set, &other] {
        assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
    }
    assert_eq!(host.envs().len(), 2, "nothing is left beside them");
}

#[tokio::test]
async fn an_environment_removed_during_its_repair_is_not_recreated_in_part() {
    let (host, set, _channel) = installed().await;
    let place = host.environment(&set);
    flip(&place.join("lib/libflux.so"));
    let gone = place.with_file_name("gone");
    let takes_it_away = {
        let place = place.clone();
        move |now: Progress| {
            if now.what == "hashing files" && place.exists() {
                fs::rename(&place, &gone).unwrap();
                fs::create_dir(&place).unwrap();
            }
        }
    };
    let refusal = mend_while(&host, &set, takes_it_away).await.unwrap_err();
    assert!(refusal.transient, "{refusal}");
    assert_eq!(fs::read_dir(&place).unwrap().count(), 0);
}

#[tokio::test]
async fn the_next_run_removes_what_a_killed_repair_left() {
    let (host, set, _channel) = installed().await;
    let left = host.prefix().join(format!("envs/.{}.mending/tree", set.digest()));
    let leave = || {
        fs::create_dir_all(&left).unwrap();
        fs::write(left.join("half"), "half").unwrap();
    };
    leave();
    assert_eq!(mend(&host, &set).await.unwrap().mended, []);
    assert_eq!(host.envs(), [set.digest()]);
    leave();
    host.link(&set).await.unwrap();
    assert_eq!(host.envs(), [set.digest()]);
}

#[tokio::test]
async fn a_repair_writes_nothing_through_a_symlink_in_place_of_a_directory() {
    let (host, set, _channel) = installed().await;
    let outside = tempfile::tempdir().unwrap();
    fs::create_dir(outside.path().join("er")).unwrap();
    fs::write(outside.path().join("er/file"), "of somebody else").unwrap();
    let deep = host.environment(&set).join("share/deep");
    fs::remove_dir_all(&deep).unwrap();
    symlink(outside.path(), &deep).unwrap();

    mend(&host, &set).await.unwrap();
    assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
    assert_eq!(fs::read_to_string(deep.join("er/file")).unwrap(), "deep");
    assert_eq!(fs::read_to_string(outside.path().join("er/file")).unwrap(), "of somebody else");
}

#[tokio::test]
async fn damaged_or_forged_records_are_not_trusted() {
    let (host, set, _channel) = installed().await;
    let at = |path: &str| host.environment(&set).join(path);
    for damage in [
        (&|| fs::write(at(packages::ENVIRONMENT_MARKER), "{").unwrap()) as &dyn Fn(),
        &|| fs::remove_file(at(".flux-distribute.records.json")).unwrap(),
        &|| fs::remove_file(at("conda-meta/one-1.0-0.json")).unwrap(),
        // The file and what is written about it agree.
        &|| {
            let records = at(".flux-distribute.records.json");
            let text = fs::read_to_string(&records).unwrap().replace("libflux.so\"", "libevil.so\"");
            fs::write(records, text).unwrap();
            fs::remove_file(at("lib/libone.so")).unwrap();
            symlink("libevil.so", at("lib/libone.so")).unwrap();
        },
    ] {
        damage();
        mend(&host, &set).await.unwrap();
        assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
        assert_eq!(fs::read_link(at("lib/libone.so")).unwrap(), Path::new("libflux.so"));
    }
}

#[tokio::test]
async fn a_damaged_archive_is_fetched_again_before_a_repair_begins() {
    let (host, set, _channel) = installed().await;
    let library = host.environment(&set).join("lib/libflux.so");
    flip(&library);
    for archive in host.archives() {
        flip(&archive);
    }
    let refusal = mend(&host, &set).await.unwrap_err();
    assert!(refusal.transient && refusal.message.contains("fetched again"), "{refusal}");
    assert_eq!(host.envs(), [set.digest()]);
    host.fetch(&set).await.unwrap();
    assert_eq!(named(&mend(&host, &set).await.unwrap().mended), ["changed lib/libflux.so"]);
}

#[tokio::test]
async fn each_damaged_file_is_found_in_one_part_of_the_looks() {
    let (host, set, _channel) = installed().await;
    let all = verify(host.prefix(), &set.digest()).files;
    flip(&host.environment(&set).join("lib/libflux.so"));
    flip(&host.environment(&set).join("share/big"));
    let (mut found, mut files) = (Vec::new(), 0);
    for number in 0..3 {
        let order = VerifyOrder {
            prefix: host.prefix().to_owned(),
            digest: Some(set.digest()),
            slice: Some(Slice { number, of: 3 }),
            ..VerifyOrder::default()
        };
        let looked = packages::verify(&order, &mut |_| ()).unwrap().remove(0);
        found.extend(named(&looked.differences));
        files += looked.files;
    }
    found.sort();
    assert_eq!(found, ["changed lib/libflux.so", "changed share/big"]);
    assert_eq!(files, all);
}
