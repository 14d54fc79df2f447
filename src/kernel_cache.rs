//! Keeps the kernels that MLX compiles for an NVIDIA GPU, for later processes.
//!
//! MLX looks up kernels by name in a folder, and writes the kernels that it compiles to the same folder. By default
//! all users and GPUs share one folder, and a process that reads while another process writes finds an incomplete
//! kernel. Here each process has a separate folder. It starts with links to the kernels that earlier processes have
//! published for the same MLX version and the same kind of GPU. New kernels are published once they are complete.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tracing::{debug, warn};

const TARGET: &str = "etkv::kernels";

/// The environment variable that names MLX's folder.
const VARIABLE: &str = "MLX_PTX_CACHE_DIR";

/// MLX's files of one kernel, in the order in which it writes them. Only the first two are read.
const PARTS: [&str; 3] = ["ptx", "txt", "cu"];

/// The folder of this process, and the folder of published kernels.
pub struct KernelCache {
    shared: PathBuf,
    own: PathBuf,
}

impl KernelCache {
    /// Creates the folder of this process under `root`, with links to the published kernels. Removes the folders of
    /// processes that have ended. `name` identifies a kind of GPU and a version of MLX.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn open(root: &Path, name: &str) -> io::Result<Self> {
        let folder = root.join(name);
        let (shared, runs) = (folder.join("published"), folder.join("processes"));
        make_private(&shared)?;
        make_private(&runs)?;
        let prefix = process_prefix();
        for entry in fs::read_dir(&runs)?.flatten() {
            // Only processes of this machine and container can be checked.
            let name = entry.file_name();
            let process = name.to_str().and_then(|name| name.strip_prefix(&prefix));
            if process.is_some_and(|process| !is_alive(process)) {
                // Another process may remove the same folder.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let own = runs.join(format!("{prefix}{}", std::process::id()));
        let _ = fs::remove_dir_all(&own);
        make_private(&own)?;
        let cache = Self { shared, own };
        let n = link_new(&cache.shared, &cache.own)?;
        debug!(target: TARGET, kernels = n, folder = %cache.own.display(), "kernels are cached");
        Ok(cache)
    }

    /// Publishes the kernels that were compiled since the last call. Returns their number. Call it only while no
    /// kernel is being compiled.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn publish(&self) -> io::Result<usize> {
        link_new(&self.own, &self.shared)
    }

    /// Returns the folder of this process.
    pub fn own(&self) -> &Path {
        &self.own
    }
}

/// Makes MLX cache its kernels in the user's cache folder. Does nothing if the host has set a folder. Call it before
/// MLX compiles anything. It sets an environment variable of the process, once.
pub fn start(architecture: &str, mlx_version: &str) -> Option<KernelCache> {
    if std::env::var_os(VARIABLE).is_some() {
        return None;
    }
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let user = folder("XDG_CACHE_HOME")
        .filter(|path| path.is_absolute())
        .or_else(|| folder("HOME").map(|home| home.join(".cache")))?;
    let name = format!("mlx-{mlx_version}-{architecture}");
    match KernelCache::open(&user.join("etkv").join("kernels"), &name) {
        Ok(cache) => {
            std::env::set_var(VARIABLE, cache.own());
            Some(cache)
        }
        Err(error) => {
            warn!(target: TARGET, %error, "cannot cache kernels, so each process compiles them again: \
             there is no folder for them");
            None
        }
    }
}

/// Creates a folder that only this user can write to, because a kernel is code.
fn make_private(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Returns a prefix of folder names that distinguishes processes of this machine and container from others.
fn process_prefix() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let digits = |text: &str| text.chars().filter(char::is_ascii_alphanumeric).collect::<String>();
    format!("{}-{}-", digits(boot.trim()), digits(&space.to_string_lossy()))
}

fn is_alive(process: &str) -> bool {
    process.parse::<u32>().is_ok() && Path::new("/proc").join(process).exists()
}

/// Links every complete kernel of `from` that `to` lacks, and returns the number of linked kernels. The last file of a
/// kernel marks the kernel as complete.
fn link_new(from: &Path, to: &Path) -> io::Result<usize> {
    let mut n = 0;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let Some(name) = path.file_name() else { continue };
        if path.is_dir() {
            // Long names of kernels contain path separators.
            make_private(&to.join(name))?;
            n += link_new(&path, &to.join(name))?;
            continue;
        }
        let is_last = path.extension().is_some_and(|extension| extension == PARTS[2]);
        if !is_last || to.join(name).exists() {
            continue;
        }
        let parts = PARTS.map(|part| path.with_extension(part));
        let is_whole = parts.iter().all(|part| part.exists());
        if is_whole && parts.iter().all(|part| link(part, to).is_ok()) {
            n += 1;
        }
    }
    Ok(n)
}

/// Links a file into a folder. Succeeds if the folder already has it.
fn link(file: &Path, folder: &Path) -> io::Result<()> {
    let Some(name) = file.file_name() else {
        return Ok(());
    };
    match fs::hard_link(file, folder.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed on drop.
    struct Root(PathBuf);

    impl Root {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("etkv-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Self(path)
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn write(folder: &Path, kernel: &str, parts: &[&str]) {
        for part in parts {
            fs::create_dir_all(folder.join(kernel).parent().unwrap()).unwrap();
            fs::write(folder.join(kernel).with_extension(part), kernel).unwrap();
        }
    }

    fn has(folder: &Path, kernel: &str) -> bool {
        PARTS.iter().all(|part| folder.join(kernel).with_extension(part).exists())
    }

    #[test]
    fn whole_kernels_reach_the_next_process() {
        let root = Root::new("kernels");
        let cache = KernelCache::open(&root.0, "gpu").unwrap();
        write(cache.own(), "add", &PARTS);
        write(cache.own(), "long/name", &PARTS);
        // A kernel that is still being compiled.
        write(cache.own(), "half", &PARTS[..2]);
        assert_eq!(cache.publish().unwrap(), 2);
        assert_eq!(cache.publish().unwrap(), 0);
        // A later process.
        let later = KernelCache::open(&root.0, "gpu").unwrap();
        assert!(has(later.own(), "add") && has(later.own(), "long/name"));
        assert!(!later.own().join("half.ptx").exists());
        let other = KernelCache::open(&root.0, "other").unwrap();
        assert!(!has(other.own(), "add"), "of another GPU");
    }

    #[test]
    fn folders_of_processes_that_are_gone_are_removed() {
        let root = Root::new("gone");
        let cache = KernelCache::open(&root.0, "gpu").unwrap();
        let named =
            |process: &str| cache.own().with_file_name(format!("{}{process}", process_prefix()));
        let gone = named("4294967295");
        fs::create_dir_all(&gone).unwrap();
        // The folder of a running process, process 1.
        let running = named("1");
        fs::create_dir_all(&running).unwrap();
        let elsewhere = cache.own().with_file_name("elsewhere-4294967295");
        fs::create_dir_all(&elsewhere).unwrap();
        KernelCache::open(&root.0, "gpu").unwrap();
        assert!(!gone.exists() && running.exists() && elsewhere.exists());
    }

    #[test]
    fn processes_that_publish_at_once_lose_nothing() {
        let root = Root::new("at-once");
        let shared = root.0.join("gpu/published");
        make_private(&shared).unwrap();
        std::thread::scope(|scope| {
            for process in 0..4 {
                let own = root.0.join(format!("gpu/processes/{process}"));
                let cache = KernelCache { shared: shared.clone(), own: own.clone() };
                scope.spawn(move || {
                    for kernel in 0..50 {
                        write(&own, &format!("kernel{kernel}"), &PARTS);
                        cache.publish().unwrap();
                    }
                });
            }
        });
        assert!((0..50).all(|kernel| has(&shared, &format!("kernel{kernel}"))));
    }
}
