//! Tensor maps that were made already.
//!
//! The driver encodes a map from numbers alone, without the GPU, but it takes as long as a launch. A map depends on
//! nothing but those numbers, so it is kept and found again by them.

use std::{
    collections::HashMap,
    sync::{PoisonError, RwLock},
};

use flashcore_driver::{
    Context, DriverError, L2Promotion, OutOfBounds, Swizzle, TensorMapElement, TensorMapSpec,
};
use flashcore_kernels::ElementType;
use flashcore_ptx::TensorMap;

use super::key::QuickState;
use crate::plan::Map;

/// Maps that are kept; with more, all are forgotten and made again.
const MOST: usize = 4096;

/// Maps by what they describe.
#[derive(Default)]
pub(super) struct KnownMaps {
    maps: RwLock<HashMap<Map, TensorMap, QuickState>>,
}

impl KnownMaps {
    /// The map as the GPU reads it.
    pub(super) fn get(&self, context: &Context, map: &Map) -> Result<TensorMap, DriverError> {
        if let Some(known) = self.maps.read().unwrap_or_else(PoisonError::into_inner).get(map) {
            return Ok(*known);
        }
        let made = encode(context, map)?;
        let mut maps = self.maps.write().unwrap_or_else(PoisonError::into_inner);
        if maps.len() >= MOST {
            maps.clear();
        }
        maps.insert(*map, made);
        Ok(made)
    }
}

fn encode(context: &Context, map: &Map) -> Result<TensorMap, DriverError> {
    let spec = TensorMapSpec {
        element: match map.dtype {
            ElementType::F16 => TensorMapElement::F16,
            ElementType::Bf16 => TensorMapElement::Bf16,
            ElementType::F32 => TensorMapElement::F32,
            ElementType::E4m3 => TensorMapElement::U8,
        },
        address: map.address,
        dims: &map.dims,
        strides: &map.strides,
        box_dims: &map.box_dims,
        swizzle: Swizzle::Bytes128,
        l2_promotion: L2Promotion::Bytes256,
        out_of_bounds: OutOfBounds::Zeros,
    };
    Ok(TensorMap(*spec.encode(context)?.as_bytes()))
}
