use etkv_core::{Cache, CacheConfig};

use super::*;
use etkv::mlx;
use etkv::{ContiguousCache, Step};

const HEADS: usize = 3;

/// The host address of the elements: MLX is on the CPU in these tests.
fn host_address(array: &Array) -> Option<u64> {
    // SAFETY: the handle is live. The address is not read.
    let at = unsafe { mlx_sys::mlx_array_data_uint8(array.as_ptr()) };
    (!at.is_null()).then_some(at as u64)
}

/// Returns the pools of a cache that has stored two rows, for a program in bfloat16.
fn pools(format: KvFormat, head_dim: i32) -> [Option<Pool>; 2] {
    let config = CacheConfig::uniform(1, HEADS as i32, head_dim, 32).stored_as(format);
    let mut cache = ContiguousCache::new(config).unwrap();
    mlx::run(|| {
        let rows = Array::ones::<f32>(&[1, HEADS as i32, 2, head_dim])?;
        let mut step = Step::begin(&mut cache, &[0, 1])?;
        step.update_and_fetch(0, &rows, &rows)?;
        Ok(step.commit(&[])?)
    })
    .unwrap();
    assert_eq!(cache.length(), 2);
    let mut step = Step::begin(&mut cache, &[2]).unwrap();
    step.place(0).unwrap().unwrap();
    let found = step.store().unwrap().planes(0).unwrap();
    let at = |pool| pool_at(pool, HEADS, head_dim as usize, Element::Bf16, host_address);
    found.each_ref().map(at)
}

const PACKED: [KvFormat; 7] = [
    KvFormat::Affine { bits: 3, group: 32 },
    KvFormat::Affine { bits: 8, group: 64 },
    KvFormat::Mxfp8,
    KvFormat::Mxfp4,
    KvFormat::Nvfp4,
    KvFormat::RowInt4,
    KvFormat::RowFp4,
];

#[test]
fn packed_pools_are_found_with_all_their_planes() {
    for stored in PACKED {
        let [Some(keys), Some(values)] = pools(stored, 64) else {
            panic!("{stored}");
        };
        assert_eq!(keys.capacity, values.capacity, "{stored}");
        let rows = [keys, values].map(|pool| match pool.rows {
            PoolRows::Packed(rows) => rows,
            rows => panic!("{stored}: {rows:?}"),
        });
        let mut addresses = Vec::new();
        for rows in rows {
            assert_eq!(rows.format, stored);
            let has_offsets = matches!(stored, KvFormat::Affine { .. });
            assert_eq!(rows.offsets.is_some(), has_offsets, "{stored}");
            addresses.extend([Some(rows.codes), Some(rows.scales), rows.offsets]);
        }
        let found: Vec<u64> = addresses.into_iter().flatten().map(|at| at.0).collect();
        for (index, at) in found.iter().enumerate() {
            assert!(!found[..index].contains(at), "{stored}: {found:x?}");
        }
    }
}

#[test]
fn floats_are_those_of_the_program() {
    for (format, fits) in [(KvFormat::Bf16, true), (KvFormat::F16, false), (KvFormat::F32, false)] {
        let found = pools(format, 48);
        assert_eq!(found.map(|pool| pool.is_some()), [fits; 2], "{format}");
        assert_eq!(takes(format, 48, Element::Bf16), fits, "{format}");
        let plain = |pool: Pool| matches!(pool.rows, PoolRows::Plain(_));
        assert!(found.into_iter().flatten().all(plain), "{format}");
    }
}

/// The groups of these formats are smaller than the 32 elements that a kernel reads at a time.
#[test]
fn packed_heads_are_multiples_of_32() {
    for format in [KvFormat::Nvfp4, KvFormat::RowInt4] {
        assert_eq!(pools(format, 48), [None; 2], "{format}");
        assert!(!takes(format, 48, Element::Bf16), "{format}");
        assert!(takes(format, 96, Element::Bf16), "{format}");
    }
}

/// Pools are converted one after the other, so the format of a pool may differ from the one that the cache
/// reports.
#[test]
fn planes_that_are_others_than_those_of_a_format_are_refused() {
    mlx::run(|| {
        let zeros = |width, dtype| -> etkv::Result<Array> {
            let made = mlx_rs::ops::zeros_dtype(&[1, HEADS as i32, 8, width], dtype)?;
            made.eval()?;
            Ok(made)
        };
        let (codes, scales) = (zeros(8, Dtype::Uint32)?, zeros(1, Dtype::Float16)?);
        let at = |format, planes: Vec<&Array>| {
            pool_at(&(format, planes), HEADS, 64, Element::Bf16, host_address).is_some()
        };
        assert!(at(KvFormat::RowInt4, vec![&codes, &scales]));
        let bytes = zeros(1, Dtype::Uint8)?;
        assert!(!at(KvFormat::RowInt4, vec![&codes, &bytes]));
        assert!(!at(KvFormat::RowInt4, vec![&codes]));
        assert!(!at(KvFormat::RowInt4, vec![&scales, &scales]));
        assert!(!at(KvFormat::RowInt4, vec![&codes, &scales, &scales]));
        assert!(!at(KvFormat::Mxfp4, vec![&codes, &scales]));
        assert!(!at(KvFormat::Affine { bits: 4, group: 64 }, vec![&codes, &scales]));
        assert!(at(KvFormat::Affine { bits: 4, group: 64 }, vec![&codes, &scales, &scales]));
        assert!(!at(KvFormat::RowInt4, vec![]));
        // A wrong number of heads, and rows that are not contiguous.
        let strided = mlx::slice_axis(&zeros(16, Dtype::Uint32)?, 3, 0, 8, 1)?;
        strided.eval()?;
        assert!(!at(KvFormat::RowInt4, vec![&strided, &scales]));
        let few = pool_at(
            &(KvFormat::RowInt4, vec![&codes, &scales]),
            HEADS - 1,
            64,
            Element::Bf16,
            host_address,
        );
        assert_eq!(few, None);
        Ok(())
    })
    .unwrap();
}

/// If the rows of a step fill a whole buffer, MLX uses their array as the buffer, with the strides of the
/// step.
#[test]
fn a_single_slot_is_found_whatever_its_stride() {
    let found = mlx::run(|| {
        let rows = Array::ones::<f32>(&[1, 1, HEADS as i32, 64])?.as_dtype(Dtype::Bfloat16)?;
        let slot = rows.transpose_axes(&[0, 2, 1, 3])?;
        mlx_rs::transforms::eval([&slot])?;
        assert_ne!(slot.strides()[2], 64, "a stride as kernels count it shows nothing");
        let pool = (KvFormat::Bf16, vec![&slot]);
        Ok(pool_at(&pool, HEADS, 64, Element::Bf16, host_address))
    });
    assert_eq!(found.unwrap().map(|pool| pool.capacity), Some(1));
}
