//! Damaged files of caches with recurrent layers: each is refused, or is loaded and does no harm. A cache that has
//! loaded such a file then runs steps, forks, is rewound, and is saved again. This must not panic or exceed limits of
//! memory and time.
//!
//! `make fuzz-files FILES=100000` runs that many. A failure prints its seed; `ETKV_SEED=<seed>` runs only that seed.

mod file;
mod guard;
mod known;
mod mutation;
mod subject;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use etkv_core::{Cache, Result, SaveCache, Status};
use etkv_file::{load, load_sequence, save, save_sequence, PrefixStore};
use etkv_tests::campaign::saving::written;
use etkv_tests::stores::{labels, MODEL};
use etkv_tests::{for_seeds, runs, Rng};
use file::Parts;
use subject::{exercise, AnyCache, Subject};

/// The number of damaged files of a seed. The Makefile divides `FILES` by this number.
const FILES: usize = 20;

/// The kind of files of a seed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    /// A whole cache.
    Whole,
    /// One sequence of a cache, which is added to others.
    Sequence,
    /// A text in a prefix store.
    Store,
}

/// The number of files that were loaded, and of files that were refused.
static OUTCOMES: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

#[test]
fn damaged_files_are_refused_or_harmless() {
    guard::watch();
    for_seeds(60, |seed| {
        let rng = &mut Rng::new(seed);
        let form = rng.pick(&[Form::Whole, Form::Whole, Form::Sequence, Form::Store]);
        let folder = folder();
        let subject = Subject::new(rng, form != Form::Whole, form == Form::Store);
        let (path, whole) = saved(rng, &subject, form, folder.path());
        let parts = Parts::of(&whole);
        assert!(parts.to_bytes().len() == whole.len(), "a file put together again differs");
        for _ in 0..FILES {
            let file = guard::limited(seed, || damaged(rng, &subject, form, &parts));
            std::fs::write(&path, file).unwrap();
            let one = &mut Rng::new(rng.next_u64());
            let loaded = guard::limited(seed, || match form {
                Form::Whole => load_whole(one, &subject, &path),
                Form::Sequence => join(one, &subject, &path),
                Form::Store => load_text(one, &subject, folder.path(), &parts.tokens()),
            });
            OUTCOMES[usize::from(!loaded)].fetch_add(1, Ordering::Relaxed);
        }
    });
    let [loaded, refused] = OUTCOMES.each_ref().map(|n| n.load(Ordering::Relaxed));
    println!("{loaded} damaged files were loaded, {refused} refused");
    if std::env::var_os("ETKV_SEED").is_none() && runs(60) >= 60 {
        let all = loaded + refused;
        assert!(loaded * 10 > all && refused * 4 > all, "{loaded} loaded, {refused} refused");
    }
}

/// Returns a folder in memory, if possible. Writing to a disk would take longer than the rest of the test.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Writes an undamaged file. Returns its path and its bytes.
fn saved(
    rng: &mut Rng,
    subject: &Subject,
    form: Form,
    folder: &Path,
) -> (std::path::PathBuf, Vec<u8>) {
    let mut path = folder.join("cache.safetensors");
    let mut cache = subject.filled(rng);
    let tokens: Vec<i64> = (0..cache.length().into()).collect();
    match form {
        Form::Whole => save(&mut *cache, &path, labels(&tokens)).unwrap(),
        Form::Sequence => {
            let live = subject::without_trees(&cache);
            save_sequence(&mut *cache, rng.pick(&live), &path, labels(&tokens)).unwrap();
        }
        Form::Store => {
            let store = PrefixStore::open(folder, u64::MAX).unwrap();
            assert!(store.save(&mut *cache, labels(&tokens)).unwrap());
            let mut files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
            path = files.find(|path| path.extension().is_some()).unwrap();
        }
    }
    let bytes = std::fs::read(&path).unwrap();
    (path, bytes)
}

/// Returns a file with some damage.
fn damaged(rng: &mut Rng, subject: &Subject, form: Form, parts: &Parts) -> Vec<u8> {
    let mut parts = parts.clone();
    if rng.chance(0.85) {
        for _ in 0..rng.pick(&[1, 1, 1, 2, 3]) {
            mutation::change_snapshot(rng, &mut parts.snapshot);
        }
        let mut cache = subject.empty();
        let planes = match form {
            Form::Sequence => cache.saving_sequence(9).unwrap().planes(&parts.snapshot),
            _ => cache.saving().unwrap().planes(&parts.snapshot),
        };
        // If the changed snapshot still fits the cache, resizes the tensors to match it.
        if let Some(planes) = planes.ok().filter(|_| rng.chance(0.95)) {
            parts.fit(&planes);
        }
    }
    if rng.chance(0.15) {
        mutation::change_sections(rng, &mut parts);
    }
    let mut file = parts.to_bytes();
    if rng.chance(0.05) {
        mutation::change_bytes(rng, &mut file);
    }
    file
}

/// Loads a file into an empty cache, or into a cache with contents.
fn load_whole(rng: &mut Rng, subject: &Subject, path: &Path) -> bool {
    let cache = if rng.chance(0.8) { subject.empty() } else { subject.filled(rng) };
    load_with(rng, subject, path, cache, |cache| load(cache, path, MODEL))
}

/// Loads a file as an additional sequence of a cache.
fn join(rng: &mut Rng, subject: &Subject, path: &Path) -> bool {
    let cache = if rng.chance(0.5) { subject.empty() } else { subject.filled(rng) };
    let target = 9 + rng.below(3) as i32;
    load_with(rng, subject, path, cache, |cache| {
        let tokens = load_sequence(cache, target, path, MODEL)?;
        assert!(cache.sequences().unwrap().seq_len(target).unwrap() > 0);
        Ok(tokens)
    })
}

/// Loads a file with `load`. If the file is refused, the contents of the cache must remain.
fn load_with(
    rng: &mut Rng,
    subject: &Subject,
    path: &Path,
    mut cache: AnyCache,
    load: impl FnOnce(&mut dyn Cache) -> Result<Vec<i64>>,
) -> bool {
    let before = written(cache.saving().unwrap());
    match load(&mut *cache) {
        Ok(_) => {
            use_and_save(rng, subject, cache, path);
            true
        }
        Err(error) => {
            // A file may have more token ids than the cache accepts.
            assert!(matches!(error.status(), Status::File | Status::Capacity), "{error}");
            assert_eq!(written(cache.saving().unwrap()), before, "{error}");
            false
        }
    }
}

/// Looks up a text in a store with a damaged file, and stores it again.
fn load_text(rng: &mut Rng, subject: &Subject, folder: &Path, text: &[i64]) -> bool {
    let store = PrefixStore::open(folder, u64::MAX).unwrap();
    let n = if rng.chance(0.7) { text.len() } else { rng.below(text.len() + 1) };
    let text = &text[..n];
    let found = store.n_stored(&*subject.empty(), MODEL, text).unwrap();
    assert!(found <= n);
    let mut cache = subject.empty();
    let held = store.load(&mut *cache, MODEL, text).unwrap();
    assert!(held <= n);
    assert_eq!(cache.next_position().unwrap(), held as i32);
    let bytes: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    exercise(rng, &mut cache);
    // Another text that begins with the same tokens.
    let mut other = subject.filled(rng);
    let tokens: Vec<i64> = (0..other.next_position().unwrap().into()).collect();
    store.save(&mut *other, labels(&tokens)).unwrap();
    let new = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    new.filter(|path| !bytes.contains(path)).for_each(|path| std::fs::remove_file(path).unwrap());
    held > 0
}

/// Uses a cache that has loaded a file, and checks that it can be saved and loaded again.
fn use_and_save(rng: &mut Rng, subject: &Subject, mut cache: AnyCache, path: &Path) {
    let again = path.with_file_name("again");
    for uses in [false, true] {
        if uses {
            exercise(rng, &mut cache);
        }
        save(&mut *cache, &again, labels(&[])).unwrap();
        let mut other = subject.empty();
        load(&mut *other, &again, MODEL).unwrap();
        let rows = |face: &mut dyn SaveCache| written(face).1;
        assert!(rows(cache.saving().unwrap()) == rows(other.saving().unwrap()));
    }
}
