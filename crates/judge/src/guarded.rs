//! Tensors in guarded memory: what lies outside a tensor is marked before a run and checked after it.
//!
//! Guard zones lie before and after every tensor, and in the gaps that its strides leave. They hold a NaN, so
//! that an engine that reads there spoils its own result. Their bits are compared afterwards, so that an
//! engine that writes there is detected.

use flashcore::F8E4M3;
use flashcore::{Aligned, DType, Layout, Storage, Tensor, TensorMut};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::rule::Row;

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arrangement {
    /// (batch, heads, length, head_dim), contiguous.
    #[default]
    Bhsd,
    /// (batch, length, heads, head_dim), contiguous.
    Bshd,
    /// (length, batch, heads, head_dim), contiguous.
    Sbhd,
    /// (batch, heads, length, head_dim) with gaps after every row and head, at an address aligned to
    /// the element only.
    Padded,
    /// One third of a (batch, length, 3, heads, head_dim) projection.
    Packed,
}

impl Arrangement {
    /// Every arrangement.
    pub const ALL: [Arrangement; 5] =
        [Arrangement::Bhsd, Arrangement::Bshd, Arrangement::Sbhd, Arrangement::Padded, Arrangement::Packed];

    /// The name used in the corpus.
    pub const fn name(self) -> &'static str {
        match self {
            Arrangement::Bhsd => "bhsd",
            Arrangement::Bshd => "bshd",
            Arrangement::Sbhd => "sbhd",
            Arrangement::Padded => "padded",
            Arrangement::Packed => "packed",
        }
    }

    /// The layout of a shape given as (batch, heads, length, head_dim).
    pub fn layout(self, shape: [usize; 4]) -> Layout {
        let [b, h, s, d] = shape.map(|x| x.max(1));
        let strides = match self {
            Arrangement::Bhsd => return Layout::bhsd(shape),
            Arrangement::Bshd => return Layout::bshd(shape),
            Arrangement::Sbhd => [h * d, d, b * h * d, 1],
            Arrangement::Padded => [h * (s * (d + 3) + 5), s * (d + 3) + 5, d + 3, 1],
            Arrangement::Packed => [s * 3 * h * d, d, 3 * h * d, 1],
        };
        Layout { shape, strides }
    }
}

impl std::fmt::Display for Arrangement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// What an output holds before a run. There are two, so that a poison value cannot pass for a result in both runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// Before the first run.
    First,
    /// Before the second.
    Second,
}

/// Guard elements before and after a tensor: more than the widest tile can reach beyond its end.
const GUARD: usize = 4096;

/// The NaN of the guard zones.
const fn guard_bits(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 0x7e77,
        DType::BF16 => 0x7fd7,
        DType::F32 => 0x7fc7_7777,
        DType::F8E4M3 => 0x7f,
        // No page is so large, and no sequence begins there.
        DType::I32 => 0x7777_7777,
    }
}

const fn poison_bits(dtype: DType, poison: Poison) -> u32 {
    match (dtype, poison) {
        (DType::F16, Poison::First) => 0x7e51,
        (DType::F16, Poison::Second) => 0xfe2a,
        (DType::BF16, Poison::First) => 0x7fd1,
        (DType::BF16, Poison::Second) => 0xffaa,
        (DType::F32, Poison::First) => 0x7fc5_1515,
        (DType::F32, Poison::Second) => 0xffca_2a2a,
        // The other NaN; no output is of f8.
        (DType::F8E4M3, _) => 0xff,
        (DType::I32, _) => 0x7171_7171,
    }
}

/// An element as its bits.
trait Bits: Copy {
    fn bits(self) -> u32;
    fn of_bits(bits: u32) -> Self;
}

impl Bits for f16 {
    fn bits(self) -> u32 {
        u32::from(self.to_bits())
    }
    fn of_bits(bits: u32) -> Self {
        f16::from_bits(bits as u16)
    }
}

impl Bits for bf16 {
    fn bits(self) -> u32 {
        u32::from(self.to_bits())
    }
    fn of_bits(bits: u32) -> Self {
        bf16::from_bits(bits as u16)
    }
}

impl Bits for f32 {
    fn bits(self) -> u32 {
        self.to_bits()
    }
    fn of_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }
}

impl Bits for i32 {
    fn bits(self) -> u32 {
        self as u32
    }
    fn of_bits(bits: u32) -> Self {
        bits as Self
    }
}

impl Bits for F8E4M3 {
    fn bits(self) -> u32 {
        u32::from(self.to_bits())
    }
    fn of_bits(bits: u32) -> Self {
        F8E4M3::from_bits(bits as u8)
    }
}

/// Runs the same code on a storage's elements, whatever their type.
macro_rules! elements {
    ($storage:expr, $data:ident => $does:expr) => {
        match $storage {
            Storage::F16($data) => $does,
            Storage::BF16($data) => $does,
            Storage::F32($data) => $does,
            Storage::F8E4M3($data) => $does,
            Storage::I32($data) => $does,
        }
    };
}

/// A guard that a run has overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Breach {
    /// Elements from the tensor's first one; negative before it.
    pub offset: isize,
    /// How many guard elements were overwritten in all.
    pub count: usize,
    /// Elements from the tensor's first to its last.
    pub reach: usize,
}

/// A tensor with guard zones around it and in its gaps.
#[derive(Debug)]
pub struct Guarded {
    storage: Storage,
    layout: Layout,
    start: usize,
}

// Not derived: a derived clone is compiled in the crate that uses it, and the workbench is not optimised.
impl Clone for Guarded {
    fn clone(&self) -> Self {
        Self { storage: self.storage.clone(), layout: self.layout, start: self.start }
    }
}

impl Guarded {
    /// A tensor whose memory holds guards everywhere; write values or poison into it before use.
    pub fn new(dtype: DType, arrangement: Arrangement, shape: [usize; 4]) -> Self {
        let layout = arrangement.layout(shape);
        let start = GUARD + usize::from(arrangement == Arrangement::Padded);
        let len = start + reach(&layout) + GUARD;
        let bits = guard_bits(dtype);
        let storage = match dtype {
            DType::F16 => Storage::F16(Aligned::filled(f16::from_bits(bits as u16), len)),
            DType::BF16 => Storage::BF16(Aligned::filled(bf16::from_bits(bits as u16), len)),
            DType::F32 => Storage::F32(Aligned::filled(f32::from_bits(bits), len)),
            DType::F8E4M3 => Storage::F8E4M3(Aligned::filled(F8E4M3::from_bits(bits as u8), len)),
            DType::I32 => Storage::I32(Aligned::filled(bits as i32, len)),
        };
        Self { storage, layout, start }
    }

    /// A tensor with values given in the order (batch, heads, length, head_dim), rounded to the dtype.
    pub fn with_values(dtype: DType, arrangement: Arrangement, shape: [usize; 4], values: &[f32]) -> Self {
        let mut tensor = Self::new(dtype, arrangement, shape);
        let [_, nh, ns, nd] = shape;
        let mut view = tensor.view_mut();
        for (i, row) in values.chunks_exact(nd.max(1)).enumerate() {
            view.write_row(i / (nh * ns), i / ns % nh, i % ns, row);
        }
        tensor
    }

    /// The tensor to read.
    pub fn view(&self) -> Tensor<'_> {
        self.part(0, self.layout.shape[0], 0, self.layout.shape[1], 0, self.layout.shape[2])
    }

    /// `nb` batch entries, `nh` heads and `ns` rows of the tensor, from (b, h, s) on.
    pub fn part(&self, b: usize, nb: usize, h: usize, nh: usize, s: usize, ns: usize) -> Tensor<'_> {
        let Layout { shape, strides } = self.layout;
        let layout = Layout { shape: [nb, nh, ns, shape[3]], strides };
        let from = self.start + b * strides[0] + h * strides[1] + s * strides[2];
        let view = match &self.storage {
            Storage::F16(data) => Tensor::strided(&data[from..], layout),
            Storage::BF16(data) => Tensor::strided(&data[from..], layout),
            Storage::F32(data) => Tensor::strided(&data[from..], layout),
            Storage::F8E4M3(data) => Tensor::strided(&data[from..], layout),
            Storage::I32(data) => Tensor::strided(&data[from..], layout),
        };
        view.expect("a part of a guarded tensor lies inside its memory")
    }

    /// The tensor to write.
    pub fn view_mut(&mut self) -> TensorMut<'_> {
        let range = self.start..self.start + reach(&self.layout);
        let view = match &mut self.storage {
            Storage::F16(data) => TensorMut::strided(&mut data[range], self.layout),
            Storage::BF16(data) => TensorMut::strided(&mut data[range], self.layout),
            Storage::F32(data) => TensorMut::strided(&mut data[range], self.layout),
            Storage::F8E4M3(data) => TensorMut::strided(&mut data[range], self.layout),
            Storage::I32(data) => TensorMut::strided(&mut data[range], self.layout),
        };
        view.expect("a guarded tensor's layout fits its memory")
    }

    /// Sizes as (batch, heads, length, head_dim).
    pub fn shape(&self) -> [usize; 4] {
        self.layout.shape
    }

    /// Fills every element with a poison.
    pub fn poison(&mut self, poison: Poison) {
        let bits = poison_bits(self.dtype(), poison);
        let (rows, width) = (self.rows(), self.layout.shape[3]);
        elements!(&mut self.storage, data => rows.into_iter().for_each(|row| fill(&mut data[row..row + width], bits)));
    }

    /// Makes row (b, h, s) unreadable: a NaN in every element, as in memory that was never written.
    pub fn spoil_row(&mut self, b: usize, h: usize, s: usize) {
        let bits = guard_bits(self.dtype());
        let first = self.start + offset(&self.layout, b, h, s);
        let width = self.layout.shape[3];
        elements!(&mut self.storage, data => fill(&mut data[first..first + width], bits));
    }

    /// The elements in the order (batch, heads, length, head_dim) that still hold the poison.
    pub fn unwritten(&self, poison: Poison) -> Vec<usize> {
        let bits = poison_bits(self.dtype(), poison);
        (0..).zip(self.bits()).filter(|&(_, element)| element == bits).map(|(i, _)| i).collect()
    }

    /// The bits of all elements in the order (batch, heads, length, head_dim).
    pub fn bits(&self) -> Vec<u32> {
        let width = self.layout.shape[3];
        let mut bits = Vec::with_capacity(self.layout.shape.iter().product());
        elements!(&self.storage, data => for row in self.rows() {
            bits.extend(data[row..row + width].iter().map(|x| x.bits()));
        });
        bits
    }

    /// All elements in the order (batch, heads, length, head_dim), widened to f32.
    pub fn values(&self) -> Vec<f32> {
        self.view().to_f32()
    }

    /// The given rows one after the other, widened to f32.
    pub fn gather(&self, rows: &[Row]) -> Vec<f32> {
        let width = self.layout.shape[3];
        let view = self.view();
        let mut all = vec![0.0; rows.len() * width];
        for (row, out) in rows.iter().zip(all.chunks_exact_mut(width.max(1))) {
            view.read_row(row.batch, row.head, row.position, out);
        }
        all
    }

    /// How many elements of each row have other bits in another tensor of the same shape.
    pub fn differences(&self, other: &Guarded) -> Vec<usize> {
        let width = self.layout.shape[3].max(1);
        let (ours, theirs) = (self.bits(), other.bits());
        let rows = ours.chunks_exact(width).zip(theirs.chunks_exact(width));
        rows.map(|(a, b)| a.iter().zip(b).filter(|(a, b)| a != b).count()).collect()
    }

    /// A number that depends on every bit of every element.
    pub fn fingerprint(&self) -> u64 {
        let add =
            |sum: u64, bits: u32| (sum ^ u64::from(bits)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        self.bits().into_iter().fold(0, add)
    }

    /// The first guard that was overwritten, if any was.
    pub fn breach(&self) -> Option<Breach> {
        let bits = guard_bits(self.dtype());
        let mut rows = self.rows();
        rows.sort_unstable();
        let width = self.layout.shape[3];
        let mut broken: Option<(usize, usize)> = None;
        let mut guards = |from: usize, to: usize| {
            let found = elements!(&self.storage, data => differing(&data[from..to], bits));
            if let Some((first, count)) = found {
                let (place, sum) = broken.unwrap_or((from + first, 0));
                broken = Some((place, sum + count));
            }
        };
        let mut from = 0;
        for row in rows {
            guards(from, row);
            from = row + width;
        }
        guards(from, self.len());
        broken.map(|(first, count)| Breach {
            offset: first as isize - self.start as isize,
            count,
            reach: reach(&self.layout),
        })
    }

    /// Whether every bit of two tensors' memory is the same, guards included.
    pub fn same_memory(&self, other: &Guarded) -> bool {
        fn same<T: Bits>(a: &[T], b: &[T]) -> bool {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.bits() == b.bits())
        }
        match (&self.storage, &other.storage) {
            (Storage::F16(a), Storage::F16(b)) => same(a, b),
            (Storage::BF16(a), Storage::BF16(b)) => same(a, b),
            (Storage::F32(a), Storage::F32(b)) => same(a, b),
            (Storage::F8E4M3(a), Storage::F8E4M3(b)) => same(a, b),
            (Storage::I32(a), Storage::I32(b)) => same(a, b),
            _ => false,
        }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self.storage {
            Storage::F16(_) => DType::F16,
            Storage::BF16(_) => DType::BF16,
            Storage::F32(_) => DType::F32,
            Storage::F8E4M3(_) => DType::F8E4M3,
            Storage::I32(_) => DType::I32,
        }
    }

    /// The elements' bytes in the order (batch, heads, length, head_dim), little-endian.
    pub fn bytes(&self) -> Vec<u8> {
        let size = self.dtype().size();
        self.bits().iter().flat_map(|bits| bits.to_le_bytes().into_iter().take(size)).collect()
    }

    /// Overwrites one element, counted from the tensor's first, even outside the tensor: as an engine would that writes
    /// where it must not.
    pub fn tamper(&mut self, offset: isize) {
        let place = self.start.checked_add_signed(offset).expect("inside the guards");
        elements!(&mut self.storage, data => fill(&mut data[place..=place], 0));
    }

    fn len(&self) -> usize {
        elements!(&self.storage, data => data.len())
    }

    /// Where each row begins, in the order (batch, heads, length).
    fn rows(&self) -> Vec<usize> {
        let [nb, nh, ns, nd] = self.layout.shape;
        if nd == 0 {
            return Vec::new();
        }
        let mut rows = Vec::with_capacity(nb * nh * ns);
        for b in 0..nb {
            for h in 0..nh {
                rows.extend((0..ns).map(|s| self.start + offset(&self.layout, b, h, s)));
            }
        }
        rows
    }
}

fn fill<T: Bits>(elements: &mut [T], bits: u32) {
    elements.fill(T::of_bits(bits));
}

/// Where the first element lies that has other bits, and how many there are.
fn differing<T: Bits>(elements: &[T], bits: u32) -> Option<(usize, usize)> {
    let differs = |x: &T| x.bits() != bits;
    let first = elements.iter().position(differs)?;
    Some((first, elements[first..].iter().filter(|x| differs(x)).count()))
}

fn offset(layout: &Layout, b: usize, h: usize, s: usize) -> usize {
    b * layout.strides[0] + h * layout.strides[1] + s * layout.strides[2]
}

/// Elements from the first to the last one; 0 when there are none.
fn reach(layout: &Layout) -> usize {
    if layout.shape.contains(&0) {
        return 0;
    }
    layout.shape.iter().zip(layout.strides).map(|(&size, stride)| (size - 1) * stride).sum::<usize>() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: [usize; 4] = [2, 3, 4, 5];

    fn ramp() -> Vec<f32> {
        (0..120).map(|i| i as f32).collect()
    }

    #[test]
    fn values_read_back_in_every_arrangement_and_dtype() {
        for dtype in DType::WIDE {
            for arrangement in Arrangement::ALL {
                let tensor = Guarded::with_values(dtype, arrangement, SHAPE, &ramp());
                assert_eq!(tensor.values(), ramp(), "{arrangement} {dtype}");
                assert_eq!(tensor.breach(), None);
                assert_eq!(tensor.bytes().len(), 120 * dtype.size());
            }
        }
    }

    #[test]
    fn a_part_is_a_window_on_the_whole() {
        for arrangement in Arrangement::ALL {
            let tensor = Guarded::with_values(DType::F32, arrangement, SHAPE, &ramp());
            let part = tensor.part(1, 1, 2, 1, 1, 2).to_f32();
            assert_eq!(part, ramp()[(3 + 2) * 20 + 5..][..10], "{arrangement}");
        }
    }

    #[test]
    fn poison_stays_until_it_is_overwritten() {
        for dtype in DType::WIDE {
            let mut tensor = Guarded::new(dtype, Arrangement::Packed, SHAPE);
            tensor.poison(Poison::First);
            assert_eq!(tensor.unwritten(Poison::First).len(), 120);
            assert_eq!(tensor.unwritten(Poison::Second).len(), 0);
            assert!(tensor.values().iter().all(|x| x.is_nan()));
            tensor.view_mut().write_row(0, 0, 1, &[1.0; 5]);
            assert_eq!(tensor.unwritten(Poison::First).len(), 115);
            assert_eq!(tensor.breach(), None);
        }
    }

    #[test]
    fn a_write_into_a_gap_or_beyond_an_end_is_a_breach() {
        for arrangement in [Arrangement::Padded, Arrangement::Packed] {
            let mut tensor = Guarded::with_values(DType::F16, arrangement, SHAPE, &ramp());
            let gap = if arrangement == Arrangement::Padded { 5 } else { 3 * 5 };
            tensor.tamper(gap as isize);
            let breach = tensor.breach().unwrap();
            assert_eq!((breach.offset, breach.count), (gap as isize, 1), "{arrangement}");
        }
        for arrangement in Arrangement::ALL {
            for outside in [-1, reach(&arrangement.layout(SHAPE)) as isize] {
                let mut tensor = Guarded::with_values(DType::F32, arrangement, SHAPE, &ramp());
                tensor.tamper(outside);
                assert_eq!(tensor.breach().unwrap().offset, outside, "{arrangement}");
            }
        }
    }

    #[test]
    fn one_other_bit_shows_in_its_row_and_in_the_fingerprint() {
        for arrangement in Arrangement::ALL {
            let tensor = Guarded::with_values(DType::F16, arrangement, SHAPE, &ramp());
            let mut other = tensor.clone();
            assert_eq!(tensor.fingerprint(), other.fingerprint());
            assert_eq!(tensor.differences(&other), [0; 24]);
            other.view_mut().write_row(1, 2, 3, &[115.0, 116.0, 118.0, 118.0, 119.0]);
            assert_ne!(tensor.fingerprint(), other.fingerprint());
            assert_eq!(tensor.differences(&other)[23], 1, "{arrangement}");
            let last = Row::query(1, 2, 3);
            assert_eq!(other.gather(&[last]), [115.0, 116.0, 118.0, 118.0, 119.0]);
        }
    }

    #[test]
    fn empty_tensors_have_guards_too() {
        let tensor = Guarded::new(DType::F16, Arrangement::Padded, [2, 3, 0, 5]);
        assert_eq!(tensor.breach(), None);
        assert!(tensor.values().is_empty() && tensor.view().shape() == [2, 3, 0, 5]);
    }
}
