//! A needle among keys that are alike, at several depths: what the sums of a kernel for 8-bit floats lose.
//!
//! One key has half as much weight as all others together. Its value has numbers in every other column, and the value that all
//! others share has them in the columns between, so that an output says how much came of either. Everything is chosen such
//! that nothing but sums is rounded: what is stored is exact, and so are the probabilities relative to the largest, which are
//! powers of two. A kernel whose sums of few bits go on over all keys stops to add the others at some point.

use std::cell::RefCell;

use flashcore::plan::{Hardware, Plan, Schedule};
use flashcore::sim::SimGpu;
use flashcore::{Attention, DType, Device, Problem, TensorBuf};
use flashcore_kernels::sm90::fwd;
use serde::Serialize;

use crate::bench::gpu::FA3;
use crate::files::widened;
use crate::gpu::host::{Host, Kind};
use crate::gpu::pool::Pool;
use crate::gpu::protocol::{Asked, Request};
use crate::gpu::worker::{PLANNER, SCHEDULE};

/// Keys, from where sums of few bits are right to where they are not.
const LENGTHS: [usize; 5] = [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 17];
const HEAD_DIMS: [usize; 2] = [64, 128];
/// Each head has its needle at a depth of its own, from the first key to the last.
const DEPTHS: usize = 5;
/// Two tiles for each head.
const QUERIES: usize = 256;
/// Batch entries, all of which are alike: so many that the tiles fill a GPU, and nobody cuts the keys into parts.
const BATCH: usize = 14;

/// An output is right if its direction is that of the truth, and the needle's part in it is.
const LEAST_COSINE: f64 = 0.99;
const MOST_OFF: f64 = 0.1;

/// A problem whose keys hide a needle in each head.
pub struct Haystack {
    /// What is asked.
    pub problem: Problem,
    /// The needle's weight, where that of any other key is 1.
    weight: f64,
}

/// What an output is like, over all rows of a head.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Likeness {
    /// The root mean square of its errors.
    pub rmse: f64,
    /// The cosine of the angle between it and the truth.
    pub cosine: f64,
    /// The sum of its errors' magnitudes, by that of the truth's.
    pub relative_error: f64,
    /// The needle's part in it, by what that should be.
    pub needle: f64,
    /// Whether it is right.
    pub found: bool,
}

/// One contender at one depth.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// Elements of a key.
    pub head_dim: usize,
    /// Keys per head.
    pub keys: usize,
    /// Where the needle is.
    pub depth: usize,
    /// Who computed it.
    pub contender: String,
    /// The schedule, of ours.
    pub schedule: Option<String>,
    /// What came of it.
    #[serde(flatten)]
    pub likeness: Option<Likeness>,
    /// Why nothing did.
    pub failure: Option<String>,
}

impl Haystack {
    /// With so many keys, a power of two.
    pub fn new(batch: usize, depths: usize, queries: usize, keys: usize, head_dim: usize) -> Self {
        let weight = keys as f64 / 2.0;
        let problem = Problem::new(batch, depths, queries, head_dim, DType::F8E4M3).with_kv(depths, keys);
        Self { problem: problem.with_scale((weight.ln() / head_dim as f64) as f32), weight }
    }

    /// Where a head's needle is.
    pub fn depth(&self, head: usize) -> usize {
        (self.problem.len_k - 1) * head / (self.problem.heads_q - 1).max(1)
    }

    /// The number in a column of the values that have one there: of three bits of fraction.
    fn number(column: usize) -> f64 {
        1.0 + (column / 2 % 8) as f64 / 8.0
    }

    /// q, k and v of one batch entry.
    pub fn inputs(&self) -> [Vec<f32>; 3] {
        let Problem { heads_q, len_q, len_k, head_dim, .. } = self.problem;
        let (mut k, mut v) = (vec![0.0_f32; heads_q * len_k * head_dim], Vec::new());
        for head in 0..heads_q {
            let needle = self.depth(head);
            k[(head * len_k + needle) * head_dim..][..head_dim].fill(1.0);
            let of = |odd: usize| {
                (0..head_dim).map(move |d| if d % 2 == odd { Self::number(d) as f32 } else { 0.0 })
            };
            let (others, own): (Vec<f32>, Vec<f32>) = (of(0).collect(), of(1).collect());
            for key in 0..len_k {
                v.extend_from_slice(if key == needle { &own } else { &others });
            }
        }
        [vec![1.0; heads_q * len_q * head_dim], k, v]
    }

    /// A row of the output, which is the same in all.
    fn truth(&self) -> Vec<f64> {
        let others = (self.problem.len_k - 1) as f64;
        let parts = [others, self.weight].map(|part| part / (others + self.weight));
        (0..self.problem.head_dim).map(|d| parts[d % 2] * Self::number(d)).collect()
    }

    /// What some rows of the output are like.
    pub fn likeness(&self, rows: &[f32]) -> Likeness {
        let truth = self.truth();
        let (mut squares, mut off, mut size) = (0.0, 0.0, 0.0);
        let (mut dot, mut own, mut theirs) = (0.0, 0.0, 0.0);
        let (mut needle, mut of_needle) = (0.0, 0.0);
        for (i, &x) in rows.iter().enumerate() {
            let (x, y) = (f64::from(x), truth[i % truth.len()]);
            squares += (x - y).powi(2);
            (off, size) = (off + (x - y).abs(), size + y.abs());
            (dot, own, theirs) = (dot + x * y, own + x * x, theirs + y * y);
            if i % 2 == 1 {
                (needle, of_needle) = (needle + x * y, of_needle + y * y);
            }
        }
        let (cosine, needle) = (dot / (own * theirs).sqrt(), needle / of_needle);
        let found = cosine > LEAST_COSINE && (needle - 1.0).abs() < MOST_OFF;
        Likeness {
            rmse: (squares / rows.len() as f64).sqrt(),
            cosine,
            relative_error: off / size,
            needle,
            found,
        }
    }

    /// What the output of the first batch entry is like at each depth, or why there is none.
    fn records(&self, contender: &str, schedule: Option<&str>, o: &Result<Vec<f32>, String>) -> Vec<Record> {
        let Problem { heads_q, len_q, len_k, head_dim, .. } = self.problem;
        let record = |head: usize| {
            let rows = |o: &Vec<f32>| self.likeness(&o[head * len_q * head_dim..][..len_q * head_dim]);
            Record {
                head_dim,
                keys: len_k,
                depth: self.depth(head),
                contender: contender.into(),
                schedule: schedule.map(String::from),
                likeness: o.as_ref().ok().map(rows),
                failure: o.as_ref().err().cloned(),
            }
        };
        (0..heads_q).map(record).collect()
    }
}

/// The planner's schedule of the kernel whose sums end with each tile of keys, and the same with sums over all keys.
fn schedules(problem: &Problem, hardware: &Hardware) -> Result<Vec<(String, Schedule)>, String> {
    let plan = Plan::choose(problem, hardware).map_err(|error| error.to_string())?;
    let default = plan.main().schedule;
    let mut all = vec![(PLANNER.to_string(), default)];
    if let Schedule::Sm90Fwd(schedule) = default {
        all.push(("flush=0".into(), Schedule::Sm90Fwd(fwd::Schedule { flush: 0, ..schedule })));
    }
    Ok(all)
}

/// Ours and FlashAttention-3's on a GPU.
pub fn on_gpu(
    ordinal: u32,
    hardware: &Hardware,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(&str, f64),
) -> Result<Vec<Record>, String> {
    let folder = tempfile::tempdir().map_err(|error| format!("no folder for inputs: {error}"))?;
    let (ours, torch) = (Host::new(Kind::Ours, ordinal), Host::new(Kind::Torch, ordinal));
    let (ours, torch) = (RefCell::new(ours), RefCell::new(torch));
    let no_torch = torch.borrow_mut().hello().err();
    let mut records = Vec::new();
    let all = HEAD_DIMS.iter().flat_map(|&head_dim| LENGTHS.map(|keys| (head_dim, keys)));
    for (i, (head_dim, keys)) in all.enumerate() {
        if stop() {
            break;
        }
        progress(&format!("{keys} keys of {head_dim}"), i as f64 / (HEAD_DIMS.len() * LENGTHS.len()) as f64);
        let hay = Haystack::new(BATCH, DEPTHS, QUERIES, keys, head_dim);
        let stored = Pool::of(DType::F8E4M3, hay.inputs()).store(folder.path())?;
        let asked = Asked::of(&hay.problem);
        let output = |host: &RefCell<Host>, who: &str| {
            let path = folder.path().join("o");
            let rows = (0..DEPTHS * QUERIES).collect();
            let request = Request::Output { who: who.into(), rows, path: path.clone() };
            host.borrow_mut().ask_about(&stored, &asked, 1, &request)?;
            let bytes = std::fs::read(&path).map_err(|error| format!("cannot read its output: {error}"))?;
            Ok(widened(&bytes, hay.problem.out()))
        };
        for (name, schedule) in schedules(&hay.problem, hardware)? {
            let text = schedule.to_string();
            let o = output(&ours, &format!("{SCHEDULE}{text}"));
            records.extend(hay.records(&name, Some(&text), &o));
        }
        let o = no_torch.clone().map_or_else(|| output(&torch, FA3), Err);
        records.extend(hay.records(FA3, None, &o));
    }
    Ok(records)
}

/// Ours on the simulator: one length beyond which sums of few bits are wrong, and one depth.
pub fn on_sim(gpu: &SimGpu, hardware: &Hardware) -> Result<Vec<Record>, String> {
    let hay = Haystack::new(1, 1, 16, 1 << 14, 16);
    let Problem { heads_q, len_q, len_k, head_dim, dtype, .. } = hay.problem;
    let shapes = [len_q, len_k, len_k].map(|len| [1, heads_q, len, head_dim]);
    let say = |error: flashcore::Error| error.to_string();
    let [q, k, v] = hay.inputs();
    let tensor = |values: &[f32], shape| TensorBuf::from_f32(values, shape, dtype).map_err(say);
    let (q, k, v) = (tensor(&q, shapes[0])?, tensor(&k, shapes[1])?, tensor(&v, shapes[2])?);
    let mut records = Vec::new();
    for (name, schedule) in schedules(&hay.problem, hardware)? {
        let device = Device::sim(gpu.clone().with_schedule(schedule));
        let attention = Attention::new().scale(hay.problem.scale);
        let o = attention.run(&device, &q.view(), &k.view(), &v.view()).map_err(say);
        let text = schedule.to_string();
        records.extend(hay.records(&name, Some(&text), &o.map(|out| out.o.to_f32())));
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use flashcore::plan::Target;

    use super::*;

    #[test]
    fn sums_that_end_with_their_tile_find_the_needle_and_those_over_all_keys_lose_what_is_around_it() {
        let records = on_sim(&SimGpu::new(Target::Sm90a), &Hardware::typical(Target::Sm90a)).unwrap();
        let found: Vec<(&str, bool)> =
            records.iter().map(|it| (it.contender.as_str(), it.likeness.unwrap().found)).collect();
        assert_eq!(found, [(PLANNER, true), ("flush=0", false)], "{records:#?}");
        assert!(records[0].likeness.unwrap().relative_error < 0.01, "{records:#?}");
    }

    #[test]
    fn an_output_is_right_if_both_its_parts_are() {
        let hay = Haystack::new(1, 5, 2, 4096, 16);
        assert_eq!([0, 1, 4].map(|head| hay.depth(head)), [0, 1023, 4095]);
        let truth: Vec<f32> = hay.truth().into_iter().map(|x| x as f32).collect();
        let with = |others: f32, needle: f32| {
            let row = truth.iter().enumerate().map(|(d, x)| x * if d % 2 == 0 { others } else { needle });
            hay.likeness(&row.collect::<Vec<f32>>().repeat(2))
        };
        let right = with(1.0, 1.0);
        assert!(right.found && right.rmse < 1e-6 && (right.cosine - 1.0).abs() < 1e-9);
        assert!(!with(0.5, 1.0).found && !with(1.0, 0.0).found && with(1.02, 0.98).found);
        assert!((with(1.0, 0.5).needle - 0.5).abs() < 1e-6);
        // What the CPU engine makes of it.
        let [q, k, v] = hay.inputs();
        let tensor =
            |values: &[f32], len| TensorBuf::from_f32(values, [1, 5, len, 16], DType::F8E4M3).unwrap();
        let (q, k, v) = (tensor(&q, 2), tensor(&k, 4096), tensor(&v, 4096));
        let attention = Attention::new().scale(hay.problem.scale);
        let out = attention.run(&Device::cpu(), &q.view(), &k.view(), &v.view()).unwrap();
        let records = hay.records("cpu", None, &Ok(out.o.to_f32()));
        assert!(records.iter().all(|record| record.likeness.unwrap().found), "{records:#?}");
    }
}
