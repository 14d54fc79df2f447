use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use super::*;

fn share(budget: &'static MemoryBudget) -> Share {
    Share::of(budget, "seq", true)
}

#[test]
fn shares_end_at_the_limit() {
    static BUDGET: MemoryBudget = MemoryBudget::new();
    let report = || {
        let BudgetReport { limit, held, peak, caches } = BUDGET.report();
        (limit, held, peak, caches)
    };
    let (mut a, mut b) = (share(&BUDGET), share(&BUDGET));
    a.reserve(u64::MAX - 1).unwrap();
    a.settle(100);
    BUDGET.set_limit(Some(300));
    b.reserve(200).unwrap();
    assert_eq!(report(), (Some(300), 300, u64::MAX - 1, 2));
    let error = a.reserve(1).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the memory budget is 300 bytes, 300 are held, and this call needs 1 more; free a cache, clear one with \
         `release` set (otherwise it keeps its buffers), or raise the budget"
    );
    assert!(MemoryBudget::is_refusal(&error.at("layer 1")));
    assert!(!MemoryBudget::is_refusal(&Error::new(
        Status::Backend,
        "the memory budget is 3 bytes"
    )));
    a.reserve(0).unwrap();
    // The new buffers have replaced the old ones.
    b.settle(150);
    a.reserve(50).unwrap();
    assert_eq!(report().1, 300);
    BUDGET.set_limit(Some(10));
    assert!(b.reserve(1).is_err());
    drop(a);
    assert_eq!(report(), (Some(10), 150, u64::MAX - 1, 1));
    b.settle(5);
    b.reserve(5).unwrap();
    BUDGET.set_limit(None);
    b.reserve(1000).unwrap();
    drop(b);
    assert_eq!((report().1, report().3), (0, 0));
}

#[test]
fn sizes_above_64_bits_are_refused_and_keep_other_shares() {
    static BUDGET: MemoryBudget = MemoryBudget::new();
    let (mut a, mut b) = (share(&BUDGET), share(&BUDGET));
    assert!(a.reserve(u64::MAX).unwrap_err().message().contains("2^64"));
    a.reserve(7).unwrap();
    let error = b.reserve(u64::MAX - 1).unwrap_err();
    let told = "cannot reserve 18446744073709551614 bytes more: 7 bytes are held";
    assert!(error.message().starts_with(told), "{error}");
    // A share can also be settled without a reservation.
    b.settle(u64::MAX);
    assert_eq!(BUDGET.report().held, u64::MAX);
    drop(b);
    assert_eq!(BUDGET.report().held, 7);
}

#[test]
fn holders_are_reported() {
    static BUDGET: MemoryBudget = MemoryBudget::new();
    let mut cache = share(&BUDGET);
    let mut prefix = Share::of(&BUDGET, "prefix", false);
    cache.describe("tree", Some("chat"));
    cache.reserve(10).unwrap();
    prefix.reserve(5).unwrap();
    let mut loaded = cache.sibling();
    loaded.reserve(20).unwrap();
    let told = || {
        let (report, holders) = BUDGET.holders();
        let of = |holder: HolderReport| (holder.id, holder.kind, holder.name, holder.held);
        (report.caches, holders.into_iter().map(of).collect::<Vec<_>>())
    };
    let (tree, prefix_kind, chat) =
        (String::from("tree"), String::from("prefix"), Some(String::from("chat")));
    let prefixes = (prefix.id(), prefix_kind, None, 5);
    let all = |held| vec![(loaded.id(), tree.clone(), chat.clone(), held), prefixes.clone()];
    assert_eq!(told(), (1, all(30)));
    drop(cache);
    assert_eq!(told(), (1, all(20)));
    drop(loaded);
    assert_eq!(told(), (0, vec![prefixes]));
}

/// A holder that frees its share in parts. It records the number of bytes of each call.
struct Idle {
    share: Mutex<Share>,
    part: u64,
    asked: AtomicU64,
}

impl Idle {
    fn holding(budget: &'static MemoryBudget, held: u64, part: u64) -> Arc<Self> {
        let mut share = Share::of(budget, "prefix", false);
        share.reserve(held).unwrap();
        Arc::new(Self { share: Mutex::new(share), part, asked: AtomicU64::new(0) })
    }

    fn asked(&self) -> u64 {
        self.asked.swap(0, Ordering::Relaxed)
    }
}

impl Reclaim for Idle {
    fn reclaim(&self, bytes: u64) -> u64 {
        self.asked.store(bytes, Ordering::Relaxed);
        let mut share = self.share.lock();
        let freed = self.part.min(share.held);
        let left = share.held - freed;
        share.settle(left);
        // This reservation does not fit, but calls no reclaimer: the reclaimer would wait for its own lock.
        assert!(share.reserve(1 << 20).is_err());
        freed
    }
}

#[test]
fn reclaimers_are_asked_in_order_before_a_refusal() {
    static BUDGET: MemoryBudget = MemoryBudget::new();
    BUDGET.set_limit(Some(1000));
    let host = Idle::holding(&BUDGET, 300, 300);
    let prefixes = Idle::holding(&BUDGET, 300, 100);
    let add = |class, reclaimer: &Arc<Idle>| {
        let reclaimer: Arc<dyn Reclaim> = reclaimer.clone();
        BUDGET.add_reclaimer(class, Arc::downgrade(&reclaimer));
    };
    add(ReclaimClass::Host, &host);
    add(ReclaimClass::IdlePrefixes, &prefixes);
    let mut cache = share(&BUDGET);
    cache.reserve(400).unwrap();
    assert_eq!((prefixes.asked(), host.asked()), (0, 0));
    // The first reclaimer frees enough.
    cache.reserve(60).unwrap();
    assert_eq!((prefixes.asked(), host.asked()), (60, 0));
    // The first reclaimer does not free enough: 40 bytes are free, 250 are needed.
    cache.reserve(250).unwrap();
    assert_eq!((prefixes.asked(), host.asked()), (210, 110));
    // A reservation above the limit calls no reclaimer.
    cache.reserve(1001).unwrap_err();
    assert_eq!((prefixes.asked(), host.asked()), (0, 0));
    // A reservation that still does not fit is refused.
    let held = BUDGET.report().held;
    let error = cache.reserve(900).unwrap_err();
    assert_eq!(prefixes.asked(), 900 - (1000 - held));
    assert!(error.message().contains("710 are held"), "{error}");
    // A dropped reclaimer is no longer called.
    drop((prefixes, host));
    cache.reserve(900).unwrap_err();
}

#[test]
fn a_defect_of_a_reclaimer_is_no_defect_of_the_cache() {
    struct Defect;
    impl Reclaim for Defect {
        fn reclaim(&self, _: u64) -> u64 {
            panic!("a defect, as the test asked for")
        }
    }
    static BUDGET: MemoryBudget = MemoryBudget::new();
    BUDGET.set_limit(Some(10));
    let defect: Arc<dyn Reclaim> = Arc::new(Defect);
    BUDGET.add_reclaimer(ReclaimClass::Host, Arc::downgrade(&defect));
    let mut cache = share(&BUDGET);
    cache.reserve(8).unwrap();
    assert!(MemoryBudget::is_refusal(&cache.reserve(8).unwrap_err()));
    assert!(!inside());
    cache.reserve(2).unwrap();
}
