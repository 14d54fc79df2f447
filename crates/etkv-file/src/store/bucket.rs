//! The files of a store in a bucket, accessed with the crate `object_store`.

mod object;
mod upload;

use std::collections::{HashMap, HashSet};
use std::fmt::{self, Display, Formatter};
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use etkv_core::error::fail;
use etkv_core::{Error, Result, Status};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, ObjectStoreScheme, PutPayload, RetryConfig};
use parking_lot::Mutex;
use tokio::runtime::{Handle, Runtime};
use tracing::debug;

use self::object::Object;
use self::upload::Upload;
use super::place::{is_name, StorePlace, StoredFile};
use super::TARGET;
use crate::checksum;
use crate::header::refused;
use crate::io::{ReadSeek, WriteFile};

/// The suffix of the empty objects that record when files were used. The time of an object's last change cannot be
/// set, so each use of a file writes a second, empty object again.
const USED: &str = ".used";

/// The minimum time between two records of a use, because each record is a request.
const NOTED_EVERY: Duration = Duration::from_secs(60);

/// The time during which a bucket that failed is not accessed, because each request would make the host wait.
const PASSED_BY: Duration = Duration::from_secs(30);

/// The number of objects that are opened at once.
const AT_ONCE: usize = 8;

/// A bucket's objects below a prefix.
pub struct Bucket {
    shared: Arc<BucketClient>,
    noted_every: Duration,
}

/// The connection to a bucket, which open objects share.
struct BucketClient {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    /// `None` only during the drop.
    runtime: Option<Runtime>,
    /// The time and the reason of the last failed request.
    failed: Mutex<Option<(Instant, String)>>,
}

impl Bucket {
    /// Opens an address, such as `s3://bucket/prefix`. Credentials and endpoint come from the environment.
    pub fn open(address: &str) -> Result<Self> {
        let wrong = |error: &dyn Display| refused(format_args!("cannot open {address}: {error}"));
        // TLS uses the provider that the process has installed. If there is none, it uses this provider.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let url = url::Url::parse(address).map_err(|error| wrong(&error))?;
        let (scheme, prefix) = ObjectStoreScheme::parse(&url).map_err(|error| wrong(&error))?;
        // The host waits for the result. If loading a text takes longer than these retries allow, the model computes
        // the text instead.
        let retry = RetryConfig {
            max_retries: 3,
            retry_timeout: Duration::from_secs(15),
            ..RetryConfig::default()
        };
        let store: object_store::Result<Arc<dyn ObjectStore>> = match scheme {
            ObjectStoreScheme::AmazonS3 => {
                let builder = AmazonS3Builder::from_env().with_url(address).with_retry(retry);
                builder.build().map(|store| Arc::new(store) as _)
            }
            ObjectStoreScheme::GoogleCloudStorage => {
                let builder = GoogleCloudStorageBuilder::from_env();
                let builder = builder.with_url(address).with_retry(retry);
                builder.build().map(|store| Arc::new(store) as _)
            }
            ObjectStoreScheme::MicrosoftAzure => {
                let builder = MicrosoftAzureBuilder::from_env();
                let builder = builder.with_url(address).with_retry(retry);
                builder.build().map(|store| Arc::new(store) as _)
            }
            _ => fail!(
                File,
                "cannot open {address}: expected a bucket, as in s3://, gs:// or az://, or the path of a folder"
            ),
        };
        Self::new(store.map_err(|error| wrong(&error))?, prefix)
    }

    /// Opens the objects of a bucket below a prefix.
    pub fn new(store: Arc<dyn ObjectStore>, prefix: Path) -> Result<Self> {
        // Connections live on this runtime's thread, even between calls.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("etkv-bucket")
            .enable_all()
            .build()
            .map_err(|error| {
                Error::new(Status::Backend, "cannot start a thread").caused_by(error)
            })?;
        let shared =
            BucketClient { store, prefix, runtime: Some(runtime), failed: Mutex::default() };
        let bucket = Self { shared: Arc::new(shared), noted_every: NOTED_EVERY };
        bucket.tidy()?;
        Ok(bucket)
    }

    /// Returns the stored files, and the times of last use by file name.
    fn all(&self) -> Result<(Vec<StoredFile>, HashMap<String, SystemTime>)> {
        let BucketClient { store, prefix, .. } = &*self.shared;
        let prefix = (!prefix.is_root()).then_some(prefix);
        let listed = self.shared.wait(store.list_with_delimiter(prefix));
        let listed = listed.map_err(|error| {
            refused(format_args!("cannot list {self}: {error}")).caused_by(error)
        })?;
        let mut files = Vec::new();
        let mut uses = HashMap::new();
        for object in listed.objects {
            let changed = SystemTime::from(object.last_modified);
            let Some(name) = object.location.filename() else { continue };
            if let Some(name) = name.strip_suffix(USED).filter(|name| is_name(name)) {
                uses.insert(name.to_owned(), changed);
            } else if is_name(name) {
                let version = format!("{:?}{changed:?}", object.e_tag);
                let [a, b, c, d, e, f, g, h, ..] = checksum::of(version.as_bytes());
                let identity = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
                let (name, bytes) = (name.to_owned(), object.size);
                files.push(StoredFile { name, bytes, used: changed, identity });
            }
        }
        Ok((files, uses))
    }

    /// Removes records of uses of files that no longer exist. Checks that the bucket can be accessed.
    fn tidy(&self) -> Result<()> {
        let (files, uses) = self.all()?;
        let names: HashSet<&str> = files.iter().map(|file| file.name.as_str()).collect();
        for name in uses.keys().filter(|name| !names.contains(name.as_str())) {
            self.delete(&format!("{name}{USED}"));
        }
        Ok(())
    }

    fn delete(&self, name: &str) {
        let BucketClient { store, .. } = &*self.shared;
        if let Err(error) = self.shared.wait(store.delete(&self.shared.at(name))) {
            debug!(target: TARGET, %error, file = name, "cannot remove a stored object");
        }
    }

    fn wrong(&self, what: &str, name: &str, error: io::Error) -> Error {
        refused(format_args!("cannot {what} {name} of {self}: {error}")).caused_by(error)
    }
}

impl BucketClient {
    fn at(&self, name: &str) -> Path {
        self.prefix.clone().join(name)
    }

    /// Waits for a request, unless a request failed recently.
    fn wait<T: Send>(
        &self,
        work: impl Future<Output = object_store::Result<T>> + Send,
    ) -> io::Result<T> {
        if let Some((when, why)) = &*self.failed.lock() {
            let ago = when.elapsed();
            if ago < PASSED_BY {
                return Err(io::Error::other(format!(
                    "not accessed: it failed {} s ago, and is accessed again after {} s: {why}",
                    ago.as_secs(),
                    PASSED_BY.as_secs()
                )));
            }
        }
        let done = self.block_on(work)?;
        // An error of a single object does not pause requests.
        *self.failed.lock() = match &done {
            Err(error @ object_store::Error::Generic { .. }) => {
                Some((Instant::now(), error.to_string()))
            }
            _ => None,
        };
        done.map_err(io::Error::from)
    }

    /// Waits for work on the runtime. A thread of another runtime must not block, so a new thread waits for it.
    fn block_on<T: Send>(&self, work: impl Future<Output = T> + Send) -> io::Result<T> {
        let ended = || io::Error::other("the request ended without an answer");
        let Some(runtime) = &self.runtime else { return Err(ended()) };
        match Handle::try_current() {
            Err(_) => Ok(runtime.block_on(work)),
            Ok(_) => std::thread::scope(|scope| scope.spawn(|| runtime.block_on(work)).join())
                .map_err(|_| ended()),
        }
    }
}

impl Drop for BucketClient {
    fn drop(&mut self) {
        // A thread of another runtime must not wait until this runtime has shut down.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Display for Bucket {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.shared.store, self.shared.prefix)
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "Bucket({self})")
    }
}

impl StorePlace for Bucket {
    fn files(&self) -> Result<Vec<StoredFile>> {
        let (mut files, uses) = self.all()?;
        for file in &mut files {
            file.used = uses.get(&file.name).map_or(file.used, |&used| used.max(file.used));
        }
        Ok(files)
    }

    fn open(&self, name: &str) -> Result<(Box<dyn ReadSeek>, u64)> {
        let object = Object::open(&self.shared, self.shared.at(name));
        let object = object.map_err(|error| self.wrong("read", name, error))?;
        let len = object.len();
        Ok((Box::new(object), len))
    }

    fn put(&self, name: &str, bytes: u64, write: &mut WriteFile) -> Result<()> {
        let mut upload = Upload::new(&self.shared, self.shared.at(name), bytes);
        match write(&mut upload) {
            Ok(()) => upload.complete().map_err(|error| self.wrong("write", name, error)),
            Err(error) => {
                upload.abort();
                Err(error)
            }
        }
    }

    fn touch(&self, file: &StoredFile) {
        let age = SystemTime::now().duration_since(file.used).unwrap_or_default();
        if age < self.noted_every {
            return;
        }
        let BucketClient { store, .. } = &*self.shared;
        let at = self.shared.at(&format!("{}{USED}", file.name));
        if let Err(error) = self.shared.wait(store.put(&at, PutPayload::new())) {
            debug!(target: TARGET, %error, file = file.name, "cannot record the use of a stored text");
        }
    }

    fn remove(&self, name: &str) {
        self.delete(name);
        self.delete(&format!("{name}{USED}"));
    }

    fn at_once(&self) -> usize {
        AT_ONCE
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;
    use crate::store::place::name_of;

    fn put(bucket: &Bucket, name: &str, bytes: &[u8]) {
        let mut write = |file: &mut dyn io::Write| -> Result<()> {
            file.write_all(bytes).map_err(|error| refused(&error).caused_by(error))
        };
        bucket.put(name, bytes.len() as u64, &mut write).unwrap();
    }

    fn names(bucket: &Bucket) -> Vec<String> {
        let mut files = bucket.files().unwrap();
        files.sort_by_key(|file| file.used);
        files.into_iter().map(|file| file.name).collect()
    }

    #[test]
    fn the_use_of_an_object_is_an_object_beside_it() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut bucket = Bucket::new(Arc::clone(&store), "a/b".into()).unwrap();
        let [one, two] = [[1], [2]].map(|text| name_of("a group", &text));
        put(&bucket, &one, b"one");
        std::thread::sleep(Duration::from_millis(5));
        put(&bucket, &two, b"two");
        assert_eq!(names(&bucket), [one.clone(), two.clone()]);
        // A recent use is not recorded again.
        let touch = |bucket: &Bucket, name: &str| {
            let files = bucket.files().unwrap();
            bucket.touch(files.iter().find(|file| file.name == name).unwrap());
        };
        touch(&bucket, &one);
        assert!(bucket.all().unwrap().1.is_empty());
        bucket.noted_every = Duration::ZERO;
        touch(&bucket, &one);
        assert_eq!(names(&bucket), [two.clone(), one.clone()]);
        // The record does not count for the bytes of files, and is removed with its file.
        assert_eq!(bucket.files().unwrap().iter().map(|file| file.bytes).sum::<u64>(), 6);
        bucket.remove(&one);
        assert!(bucket.all().unwrap().1.is_empty());
        // If another process left a record without its file, the next opening of the bucket removes the record.
        touch(&bucket, &two);
        bucket.delete(&two);
        assert_eq!(bucket.all().unwrap().1.len(), 1);
        Bucket::new(store, "a/b".into()).unwrap();
        assert!(bucket.all().unwrap().1.is_empty());
    }

    #[test]
    fn an_object_is_read_at_any_offset() {
        use std::io::{Read, Seek, SeekFrom};

        let bucket = Bucket::new(Arc::new(InMemory::new()), Path::default()).unwrap();
        let bytes: Vec<u8> = (0..40_000_000u32).map(|at| (at ^ (at >> 11)) as u8).collect();
        let name = name_of("a group", &[3]);
        put(&bucket, &name, &bytes);
        let (mut file, len) = bucket.open(&name).unwrap();
        assert_eq!(len, bytes.len() as u64);
        let mut check = |at: usize, n: usize| {
            let mut found = vec![0; n];
            file.seek(SeekFrom::Start(at as u64)).unwrap();
            file.read_exact(&mut found).unwrap();
            assert!(found == bytes[at..at + n], "{n} bytes at {at}");
        };
        for (at, n) in [(0, 8), (39_999_990, 10), (8, 300_000), (300_008, 39_699_992), (5, 5)] {
            check(at, n);
        }
        // Reads at growing offsets with gaps, and at the end.
        for at in (0..39_000_000).step_by(3_000_001) {
            check(at, 1_000_000);
        }
        assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), len);
        assert_eq!(file.read(&mut [0; 4]).unwrap(), 0);
        assert!(file.seek(SeekFrom::Current(-50_000_000)).is_err());
        // Reading fails if another object replaces the object that was opened.
        put(&bucket, &name, &bytes[1..]);
        file.seek(SeekFrom::Start(20_000_000)).unwrap();
        assert!(file.read_exact(&mut [0; 4]).is_err());
        assert!(bucket.open(&name_of("a group", &[4])).is_err());
    }

    #[test]
    fn incomplete_objects_are_not_visible() {
        let bucket = Bucket::new(Arc::new(InMemory::new()), Path::default()).unwrap();
        let name = name_of("a group", &[3]);
        for n in [10, 20 << 20] {
            let mut write = |file: &mut dyn io::Write| -> Result<()> {
                file.write_all(&vec![7; n]).map_err(|error| refused(&error).caused_by(error))?;
                fail!(Backend, "no more rows")
            };
            let error = bucket.put(&name, 2 * n as u64, &mut write).unwrap_err();
            assert_eq!(error.message(), "no more rows");
            assert!(names(&bucket).is_empty());
        }
    }

    /// For example, the other runtime is that of a server that calls the store while it handles a request.
    #[test]
    fn a_thread_of_another_runtime_may_call() {
        let other = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let found = other.block_on(async {
            let bucket = Bucket::new(Arc::new(InMemory::new()), Path::default()).unwrap();
            put(&bucket, &name_of("a group", &[3]), b"one");
            names(&bucket).len()
        });
        assert_eq!(found, 1);
    }
}
