use super::*;
use crate::step::plan::{CopiedRows, Element, Gate, Norm, PackedRows};
use crate::Error;
use etkv_core::KvFormat;

/// Returns a plan of one layer.
fn plan() -> Plan {
    let pool = |address| Pool { rows: PoolRows::Plain(Address(address)), capacity: 100 };
    let (keys, values) = (pool(1 << 20), pool(2 << 20));
    let weight = Address(4096);
    let product = Product {
        norm: Some(Norm { weight: Some(weight), wide: false, eps: 1e-5 }),
        ..Product::plain(Buffer(0), Weight::Plain(weight), 256, 768, Buffer(1))
    };
    let heads =
        Heads { group: 0, n_q: 8, n_kv: 2, head_dim: 64, periods: None, rotated: 64, keys, values };
    let launches = vec![
        Launch::Embed(Embed {
            table: Weight::Plain(weight),
            scale: None,
            vocabulary: 1000,
            inner: 256,
            out: Buffer(0),
        }),
        Launch::Product(Product { heads: Some(heads), ..product }),
        Launch::Attend(Attend {
            group: 0,
            q: Buffer(1),
            keys,
            values,
            n_q: 8,
            n_kv: 2,
            head_dim: 64,
            scale: 0.125,
            out: Buffer(2),
        }),
        Launch::Product(Product {
            residual: Some(Buffer(0)),
            ..Product::plain(Buffer(2), Weight::Plain(weight), 512, 256, Buffer(0))
        }),
        Launch::Product(Product { last_row: true, outputs: 1000, out: Buffer(3), ..product }),
    ];
    let (buffer, copied) = (Buffer(3), CopiedRows::All);
    Plan {
        logits: Some(Logits { buffer, rows: 1, vocabulary: 1000, copied, chosen: true }),
        ..Plan::new(Element::Bf16, 4, vec![4 * 256, 4 * 512, 4 * 512, 1000], launches)
    }
}

/// Returns the error of a plan, or an empty text.
fn told(plan: &Plan) -> String {
    check(plan).err().map_or_else(String::new, |error| error.to_string())
}

/// Returns the error of a plan after `change`.
fn refused(change: impl FnOnce(&mut Plan)) -> String {
    let mut plan = plan();
    change(&mut plan);
    match check(&plan) {
        Err(Error::Plan(text)) => text,
        other => panic!("{other:?}"),
    }
}

fn product(plan: &mut Plan, number: usize) -> &mut Product {
    match &mut plan.launches[number] {
        Launch::Product(product) => product,
        other => panic!("{other:?}"),
    }
}

/// Returns a packed weight with any number of rows.
fn packed() -> PackedWeight {
    let at = Address(4096);
    PackedWeight { codes: at, scales: at, biases: at, bits: 4, group: 64 }
}

fn heads(plan: &mut Plan) -> &mut Heads {
    product(plan, 1).heads.as_mut().unwrap()
}

fn attend(plan: &mut Plan) -> &mut Attend {
    match &mut plan.launches[2] {
        Launch::Attend(attend) => attend,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_plan_that_can_be_is_taken() {
    check(&plan()).unwrap();
    assert_eq!(capacity(&plan(), 0), 100);
    assert_eq!(capacity(&plan(), 1), MAX);
}

#[test]
fn sizes_that_kernels_do_not_take_are_refused() {
    assert_eq!(refused(|plan| plan.tokens = 0), "0 tokens, expected 1 to 64");
    assert_eq!(refused(|plan| plan.tokens = 65), "65 tokens, expected 1 to 64");
    assert!(refused(|plan| plan.attention_blocks = Some(0)).contains("0 blocks"));
    let text = refused(|plan| product(plan, 3).inner = 508);
    assert_eq!(text, "launch 3: rows of 508 elements, expected a multiple of 8");
    assert!(refused(|plan| product(plan, 4).outputs = 0).contains("0 outputs"));
    assert!(refused(|plan| product(plan, 1).outputs = 512).contains("expected 768"));
    assert!(refused(|plan| heads(plan).n_kv = 3).contains("expected a multiple of 3"));
    assert!(refused(|plan| heads(plan).head_dim = 72).contains("multiple of 16"));
    assert!(refused(|plan| attend(plan).head_dim = 272).contains("of 272 elements"));
    assert!(refused(|plan| heads(plan).rotated = 32).contains("place heads that rotate in part"));
    assert!(refused(|plan| attend(plan).scale = f32::NAN).contains("NaN"));
    assert!(refused(
        |plan| product(plan, 1).norm = Some(Norm { weight: None, wide: false, eps: -1.0 })
    )
    .contains("-1"));
}

#[test]
fn addresses_that_cannot_be_read_are_refused() {
    let text = refused(|plan| product(plan, 3).weight = Weight::Plain(Address(0)));
    assert!(text.contains("the weight at 0x0"));
    assert!(refused(|plan| product(plan, 3).bias = Some(Address(3))).contains("the bias at 0x3"));
    assert!(refused(|plan| heads(plan).keys.rows = PoolRows::Plain(Address(8)))
        .contains("a multiple of 16"));
    assert!(refused(|plan| heads(plan).periods = Some(Address(2))).contains("the periods"));
    assert!(refused(|plan| attend(plan).values.capacity = 0).contains("0 rows of a pool"));
}

#[test]
fn packed_weights_that_kernels_do_not_take_are_refused() {
    let with = |change: fn(&mut PackedWeight)| {
        let mut packed = packed();
        change(&mut packed);
        let mut plan = plan();
        product(&mut plan, 3).weight = Weight::Packed(packed);
        told(&plan)
    };
    assert_eq!(with(|_| ()), "");
    assert_eq!(with(|packed| (packed.bits, packed.group) = (8, 128)), "");
    assert!(with(|packed| packed.bits = 2).contains("the weight of 2 bits, expected [4, 8]"));
    assert!(with(|packed| packed.group = 16).contains("groups of 16, expected [32, 64, 128]"));
    assert!(with(|packed| packed.codes = Address(8)).contains("the codes of the weight at 0x8"));
    assert!(with(|packed| packed.scales = Address(0)).contains("the scales of the weight at 0x0"));
    assert!(with(|packed| packed.biases = Address(1)).contains("the biases of the weight at 0x1"));
    let text = refused(|plan| {
        product(plan, 3).inner = 480;
        product(plan, 3).weight = Weight::Packed(packed());
    });
    assert_eq!(text, "launch 3: the weight with rows of 480 elements, expected a multiple of 64");
    let text = refused(|plan| match &mut plan.launches[0] {
        Launch::Embed(embed) => embed.table = Weight::Packed(PackedWeight { bits: 5, ..packed() }),
        other => panic!("{other:?}"),
    });
    assert_eq!(text, "launch 0: the table of 5 bits, expected [4, 8]");
}

fn packed_rows(format: KvFormat) -> PackedRows {
    let at = Address(4096);
    let offsets = matches!(format, KvFormat::Affine { .. }).then_some(at);
    PackedRows { format, codes: at, scales: at, offsets }
}

#[test]
fn packed_pools_that_kernels_do_not_take_are_refused() {
    let with = |rows: PackedRows| {
        let mut plan = plan();
        attend(&mut plan).keys.rows = PoolRows::Packed(rows);
        told(&plan)
    };
    let affine = |bits, group| packed_rows(KvFormat::Affine { bits, group });
    assert_eq!(with(affine(4, 64)), "");
    assert_eq!(with(packed_rows(KvFormat::RowFp4)), "");
    assert!(with(affine(7, 64))
        .contains("the keys: expected affine storage of 2, 3, 4, 5, 6 or 8 bits, got 7"));
    assert!(with(affine(4, 16)).contains("groups of 32, 64 or 128 elements, got 16"));
    assert!(with(affine(4, 128)).contains("a head_dim that is a multiple of 128, got head_dim 64"));
    assert!(with(packed_rows(KvFormat::Bf16)).contains("in bf16, a float format"));
    let text = with(PackedRows { codes: Address(8), ..affine(4, 64) });
    assert!(text.contains("the codes of the keys at 0x8"), "{text}");
    let text = with(PackedRows { scales: Address(0), ..affine(4, 64) });
    assert!(text.contains("the scales of the keys at 0x0"), "{text}");
    assert!(with(PackedRows { offsets: None, ..affine(4, 64) }).contains("without offsets"));
    let text = with(PackedRows { format: KvFormat::Mxfp4, ..affine(4, 64) });
    assert!(text.contains("the keys with offsets, which their format lacks"), "{text}");
    let rows = PoolRows::Packed(affine(4, 64));
    assert!(refused(|plan| heads(plan).keys.rows = rows).contains("plain pools"));
}

#[test]
fn heads_that_cannot_be_placed_are_refused() {
    let refused = |change: fn(&mut PlaceHeads)| {
        let mut plan = plan();
        let mut heads = product(&mut plan, 1).heads.take().unwrap();
        heads.values.rows = PoolRows::Packed(packed_rows(KvFormat::Nvfp4));
        plan.buffers.push(4 * 768);
        product(&mut plan, 1).out = Buffer(4);
        let norm = Some(Norm { weight: Some(Address(4096)), wide: false, eps: 1e-6 });
        let (q_norm, k_norm) = (norm, None);
        let mut place = PlaceHeads { x: Buffer(4), heads, q_norm, k_norm, out: Buffer(1) };
        change(&mut place);
        plan.launches.insert(2, Launch::PlaceHeads(place));
        told(&plan)
    };
    assert_eq!(refused(|_| ()), "");
    assert!(refused(|place| place.heads.n_kv = 3).contains("8 heads, expected a multiple of 3"));
    assert!(refused(|place| place.heads.head_dim = 48).contains("a multiple of 32"));
    assert!(refused(|place| place.k_norm = Some(Norm { weight: None, wide: false, eps: -1.0 }))
        .contains("-1"));
    assert!(refused(|place| place.x = Buffer(0)).contains("buffer 0 has 1024 elements"));
    assert!(refused(|place| place.out = Buffer(4)).contains("over the heads"));
    assert_eq!(refused(|place| place.heads.rotated = 48), "");
    assert!(
        refused(|place| place.heads.rotated = 40).contains("40 elements that rotate, expected a")
    );
    assert!(refused(|place| place.heads.rotated = 80).contains("80 elements that rotate"));
    let text = refused(|place| place.heads.keys.rows = PoolRows::Plain(Address(2)));
    assert!(text.contains("the keys at 0x2"), "{text}");
}

#[test]
fn rows_that_cannot_be_normalized_are_refused() {
    let refused = |change: fn(&mut Plan, &mut Normalize)| {
        let mut plan = plan();
        plan.buffers.extend([4 * 256; 2]);
        let norm = Norm { weight: Some(Address(4096)), wide: true, eps: 1e-6 };
        let next = Some((Norm { weight: None, ..norm }, Buffer(5)));
        let (x, residual, out) = (Buffer(0), Some(Buffer(0)), Buffer(4));
        let columns = None;
        let mut normalize = Normalize { x, inner: 256, norm, residual, out, columns, next };
        change(&mut plan, &mut normalize);
        // After the embeddings.
        let first = plan.launches.len() - 4;
        plan.launches.insert(first, Launch::Normalize(normalize));
        told(&plan)
    };
    assert_eq!(refused(|_, _| ()), "");
    // The residual may be in the buffer of the result, if an earlier launch has written it.
    let in_place = |plan: &mut Plan, normalize: &mut Normalize| {
        plan.launches.insert(0, plan.launches[0]);
        if let Launch::Embed(embed) = &mut plan.launches[0] {
            (embed.out, embed.scale) = (Buffer(4), Some(Address(2)));
        }
        normalize.residual = Some(normalize.out);
    };
    assert_eq!(refused(in_place), "");
    assert!(refused(|_, rows| rows.inner = 252).contains("252 elements, expected a multiple of 8"));
    assert!(refused(|_, rows| rows.norm.weight = Some(Address(2))).contains("a multiple of 4"));
    assert!(refused(|_, rows| rows.norm.eps = f32::NAN).contains("an epsilon of NaN"));
    assert!(refused(|_, rows| rows.x = Buffer(4)).contains("buffer 4 is read before"));
    assert!(refused(|_, rows| rows.out = Buffer(0)).contains("over the rows that are normalized"));
    for over in [|rows: &Normalize| rows.x, |rows: &Normalize| rows.out] {
        let norm = Norm { weight: None, wide: false, eps: 0.0 };
        let (x, inner, residual, out, columns) = (Buffer(0), 8, None, Buffer(1), None);
        let mut rows = Normalize { x, inner, norm, residual, out, columns, next: None };
        rows.next = Some((norm, over(&rows)));
        let mut plan = plan();
        plan.launches.insert(1, Launch::Normalize(rows));
        assert!(told(&plan).contains("over the rows"));
    }
    assert!(refused(|plan, _| {
        if let Launch::Embed(embed) = &mut plan.launches[0] {
            embed.scale = Some(Address(1));
        }
    })
    .contains("the scale at 0x1"));
    let text = refused(|plan, rows| product(plan, 1).norm = Some(rows.norm));
    assert!(text.contains("normalize the rows before"), "{text}");
}

#[test]
fn buffers_that_do_not_fit_are_refused() {
    assert!(refused(|plan| plan.buffers[1] -= 1).contains("buffer 1 has 2047 elements"));
    assert!(refused(|plan| plan.buffers[3] = usize::MAX).contains("elements of a buffer"));
    assert!(refused(|plan| product(plan, 4).out = Buffer(9)).contains("buffer 9 of 4"));
    assert!(refused(|plan| product(plan, 3).out = Buffer(2)).contains("written over"));
    assert!(refused(|plan| attend(plan).out = Buffer(1)).contains("over the queries"));
    let text = refused(|plan| {
        plan.launches.remove(2);
    });
    assert_eq!(text, "launch 2: buffer 2 is read before it is written");
    assert!(refused(|plan| plan.logits.as_mut().unwrap().rows = 2).contains("expected 2000"));
    let text = refused(|plan| {
        let logits = plan.logits.as_mut().unwrap();
        (logits.copied, logits.rows) = (CopiedRows::Last, plan.tokens + 1);
    });
    assert!(text.contains("to copy the row of the last token"), "{text}");
    assert!(refused(|plan| product(plan, 1).gate = Some(Gate::Silu)).contains("neither gate"));
    let text = refused(|plan| {
        plan.masked = vec![true];
        plan.launches.truncate(1);
    });
    assert_eq!(text, "a mask without attention");
}

#[test]
fn groups_that_a_plan_lacks_are_refused() {
    assert!(refused(|plan| plan.masked.clear()).contains("0 groups, expected 1 to 4"));
    assert!(refused(|plan| plan.masked = vec![false; 5]).contains("5 groups"));
    assert_eq!(refused(|plan| heads(plan).group = 1), "launch 1: group 1 of 1");
    assert_eq!(refused(|plan| attend(plan).group = 2), "launch 2: group 2 of 1");
    // A group with a mask, but without attention.
    assert_eq!(refused(|plan| plan.masked = vec![false, true]), "a mask without attention");
}

#[test]
fn rows_that_the_host_cannot_fill_or_get_are_refused() {
    let logits = plan().logits.unwrap().buffer;
    let refused = |given: &[usize], tapped: &[usize], change: fn(&mut Plan)| {
        let mut plan = plan();
        plan.buffers.extend([4 * 256, 4 * 256]);
        let buffers = |all: &[usize]| all.iter().map(|&index| Buffer(index)).collect();
        (plan.given, plan.tapped) = (buffers(given), buffers(tapped));
        change(&mut plan);
        told(&plan)
    };
    let same = |_: &mut Plan| {};
    assert_eq!(refused(&[4, 5], &[0, 1], same), "");
    assert!(refused(&[9], &[], same).contains("buffer 9 of 6"));
    assert!(refused(&[4, 4], &[], same).contains("buffer 4 is listed twice"));
    assert!(refused(&[4], &[], |plan| plan.buffers[4] = 1023)
        .contains("1023 elements, expected a multiple of 4"));
    assert!(refused(&[], &[99], same).contains("99"));
    assert!(refused(&[], &[4], same).contains("buffer 4 is read before it is written"));
    assert!(refused(&[4], &[4], same).contains("buffer 4 is tapped twice, also given"));
    assert!(refused(&[], &[0, 0], same).contains("buffer 0 is tapped twice"));
    assert!(refused(&[], &[logits.0], same).contains("also given, or the logits"));
    assert!(refused(&[], &[0], |plan| plan.logits = None).contains("without logits"));
    assert!(refused(&[], &[0], |plan| plan.buffers[0] = 1028).contains("1028 tapped elements"));
}

/// A norm that writes columns of wider rows, and a blend of rows that the host fills, both after the
/// embeddings.
#[test]
fn columns_and_blends_that_do_not_fit_are_refused() {
    let refused = |change: fn(&mut Normalize, &mut Blend)| {
        let mut plan = plan();
        // The wider rows, the rows from the host, and their shares.
        plan.buffers.extend([4 * 512, 4 * 256, 4]);
        plan.given = vec![Buffer(5), Buffer(6)];
        let mut normalize = Normalize {
            x: Buffer(5),
            inner: 256,
            norm: Norm { weight: None, wide: false, eps: 1e-6 },
            residual: None,
            out: Buffer(4),
            columns: Some(Columns { first: 256, width: 512 }),
            next: None,
        };
        let (x, y, share, out) = (Buffer(0), Buffer(5), Buffer(6), Buffer(0));
        let mut blend = Blend { x, y, share, inner: 256, out };
        change(&mut normalize, &mut blend);
        plan.launches.splice(1..1, [Launch::Normalize(normalize), Launch::Blend(blend)]);
        told(&plan)
    };
    assert_eq!(refused(|_, _| ()), "");
    assert_eq!(refused(|rows, _| rows.columns = Some(Columns { first: 0, width: 512 })), "");
    assert!(refused(|rows, _| rows.columns = Some(Columns { first: 264, width: 512 }))
        .contains("256 columns from 264 on, in rows of 512"));
    assert!(refused(|rows, _| rows.columns = Some(Columns { first: 0, width: 248 }))
        .contains("256 columns from 0 on, in rows of 248"));
    assert!(refused(|rows, _| rows.columns = Some(Columns { first: 4, width: 512 }))
        .contains("columns from 4 on, expected a multiple of 8"));
    assert!(refused(|rows, _| rows.columns = Some(Columns { first: 0, width: 516 }))
        .contains("rows of 516 elements"));
    assert!(refused(|rows, _| rows.columns = Some(Columns { first: 0, width: 1024 }))
        .contains("buffer 4 has 2048 elements, expected 4096"));
    assert!(refused(|rows, _| rows.next = Some((rows.norm, Buffer(2)))).contains("wider rows"));
    assert!(refused(|rows, _| rows.residual = Some(rows.out)).contains("read before"));
    assert!(refused(|_, blend| blend.x = Buffer(4)).is_empty());
    assert!(refused(|_, blend| blend.y = Buffer(2)).contains("buffer 2 is read before"));
    assert!(refused(|_, blend| blend.share = Buffer(2)).contains("buffer 2 is read before"));
    assert!(refused(|_, blend| blend.inner = 260).contains("a multiple of 8"));
    assert!(refused(|_, blend| blend.out = blend.share).contains("over the shares"));
    assert!(refused(|_, blend| blend.y = blend.share).contains("buffer 6 has 4 elements"));
}
