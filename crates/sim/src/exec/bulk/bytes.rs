//! The effect of a bulk copy: bytes that are read, written or reduced.

use flashcore_ptx::{AtomOp, AtomTy};

use crate::exec::atomic::{apply, atom_bytes};
use crate::exec::bulk::sides::{GlobalSide, SharedSide};
use crate::machine::Cluster;
use crate::memory::global::{GlobalMemory, POISON};
use crate::memory::tensor_map::Swizzle;
use crate::races::global_shadow::LINE;

impl Cluster<'_> {
    /// Puts the bytes of a copy's source in global memory into `out`, in box order.
    pub(super) fn read_global(&self, side: &GlobalSide, bytes: u32, out: &mut Vec<u8>) {
        let memory = self.launch.memory;
        // What lies outside of the allocations has been reported; it reads as poison, element by element.
        let read = |address: u64, size: usize, out: &mut [u8]| match memory.find(address, out.len() as u64) {
            Some((region, offset)) => region.read(offset, out),
            None => {
                for (i, element) in out.chunks_exact_mut(size).enumerate() {
                    match memory.find(address + (i * size) as u64, size as u64) {
                        Some((region, offset)) => region.read(offset, element),
                        None => element.copy_from_slice(&POISON.to_le_bytes()[..size]),
                    }
                }
            }
        };
        out.clear();
        out.resize(bytes as usize, 0);
        match side {
            GlobalSide::Linear(address, _) => read(*address, 8, out),
            GlobalSide::Tensor(map, at) => {
                let size = map.element.bytes() as usize;
                let fill = map.fill().to_le_bytes();
                map.for_runs(at, |start, bytes, address| {
                    let run = &mut out[start as usize..][..bytes as usize];
                    match address {
                        Some(address) => read(address, size, run),
                        None => run.chunks_exact_mut(size).for_each(|e| e.copy_from_slice(&fill[..size])),
                    }
                });
            }
        }
    }

    /// Writes or reduces a copy's bytes into global memory.
    pub(super) fn write_global(&self, side: &GlobalSide, data: &[u8], reduce: Option<(AtomOp, AtomTy)>) {
        let memory = self.launch.memory;
        let put = |address: u64, bytes: &[u8]| {
            let size = bytes.len() as u32;
            let Some((region, offset)) = memory.find(address, u64::from(size)) else { return };
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            let value = u64::from_le_bytes(word);
            match reduce {
                None => region.store(offset, size, value),
                Some((op, ty)) => {
                    region.update(offset, size, |old| apply(op, ty, old, value, 0, true));
                    region.note_written(offset, size);
                }
            }
        };
        match side {
            GlobalSide::Linear(address, _) => {
                let size = reduce.map_or(8, |(_, ty)| atom_bytes(ty));
                for (i, chunk) in data.chunks_exact(size as usize).enumerate() {
                    put(address + i as u64 * u64::from(size), chunk);
                }
            }
            GlobalSide::Tensor(map, at) => {
                let size = map.element.bytes() as usize;
                map.for_runs(at, |start, bytes, address| {
                    let Some(address) = address else { return };
                    let run = &data[start as usize..][..bytes as usize];
                    // Whole words where nothing is reduced and the run allows it.
                    let inside = memory.find(address, u64::from(bytes)).is_some();
                    let whole = reduce.is_none() && inside && address % 8 == 0 && bytes % 8 == 0;
                    let size = if whole { 8 } else { size };
                    let lines = if whole { store_lines(memory, address, run) } else { 0 };
                    let (address, run) = (address + lines as u64, &run[lines..]);
                    for (i, element) in run.chunks_exact(size).enumerate() {
                        put(address + (i * size) as u64, element);
                    }
                });
            }
        }
    }

    /// The bytes of a copy's shared side, in box order.
    pub(super) fn read_shared(&self, side: SharedSide) -> Vec<u8> {
        let shared = &self.blocks[side.block].shared;
        if side.swizzle == Swizzle::None {
            return shared.at(side.address, side.bytes).to_vec();
        }
        let mut bytes = Vec::with_capacity(side.bytes as usize);
        for address in side.chunks() {
            bytes.extend_from_slice(shared.at(address, 16));
        }
        bytes
    }

    /// Writes a copy's shared side.
    pub(super) fn write_shared(&mut self, side: SharedSide, data: &[u8]) {
        let shared = &mut self.blocks[side.block].shared;
        if side.swizzle == Swizzle::None {
            shared.at_mut(side.address, side.bytes).copy_from_slice(data);
            return;
        }
        for (address, chunk) in side.chunks().zip(data.chunks_exact(16)) {
            shared.at_mut(address, 16).copy_from_slice(chunk);
        }
    }
}

/// Stores the whole lines that a run of bytes begins with. Returns how many bytes they are.
fn store_lines(memory: &GlobalMemory, address: u64, run: &[u8]) -> usize {
    let Some((region, offset)) = memory.find(address, run.len() as u64) else { return 0 };
    if !offset.is_multiple_of(LINE) {
        return 0;
    }
    let lines = run.as_chunks::<LINE>().0;
    for (i, bytes) in lines.iter().enumerate() {
        let mut line = [0; LINE / 8];
        for (word, bytes) in line.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        region.store_line(offset + i * LINE, &line);
    }
    lines.len() * LINE
}

/// Reduces bytes element by element.
pub(super) fn reduce_bytes(op: AtomOp, ty: AtomTy, into: &mut [u8], from: &[u8]) {
    let size = atom_bytes(ty) as usize;
    for (a, b) in into.chunks_exact_mut(size).zip(from.chunks_exact(size)) {
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..size].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        };
        let new = apply(op, ty, word(a), word(b), 0, false);
        a.copy_from_slice(&new.to_le_bytes()[..size]);
    }
}
