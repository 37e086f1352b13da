//! The problems that a faulty kernel must fail: in them every bound is met exactly, and every part of a kernel has
//! something to do.

use flashcore::sim::{AsyncMode, Config, SimGpu};
use flashcore::{DType, Device, Keys, Mask, Name, Pass, Problem, Queries};
use flashcore_judge::placing::{self, Placing};
use flashcore_lab::guarded::{Arrangement, Guarded};
use flashcore_lab::inputs::Distribution;
use flashcore_lab::operands::Operands;
use flashcore_lab::rule::Yardstick;

/// A problem with its inputs and the truth about them.
pub struct Trial {
    pub operands: Operands,
    truth: Yardstick,
}

impl Trial {
    fn new(problem: Problem, lengths: Option<Vec<u32>>) -> Trial {
        let operands = Operands::draw(problem, lengths, Arrangement::Bhsd, Distribution::Normal, 7);
        Trial { truth: operands.yardstick(), operands }
    }

    /// Runs it under every timing of asynchronous effects and warps. Returns what is wrong with the first run that is
    /// not right, or that the simulator objects to.
    pub fn run(&self, gpu: &SimGpu) -> Result<(), String> {
        configs().into_iter().try_for_each(|config| self.run_with(gpu, config))
    }

    fn run_with(&self, gpu: &SimGpu, config: Config) -> Result<(), String> {
        let device = Device::sim(gpu.clone().with_config(config));
        if let Some(placing) = self.operands.placing() {
            return self.run_placed(&device, placing);
        }
        let Operands { q, k, v, .. } = &self.operands;
        let given = if self.operands.problem.pass == Pass::Backward {
            let run = self.operands.attention().backward(&device, &self.operands.given());
            let out = run.map_err(|error| error.to_string())?;
            vec![(Name::Dq, out.dq.to_f32()), (Name::Dk, out.dk.to_f32()), (Name::Dv, out.dv.to_f32())]
        } else {
            let run = self.operands.attention().with_lse().run(&device, &q.view(), &k.view(), &v.view());
            let out = run.map_err(|error| error.to_string())?;
            let lse = out.lse.map(|lse| (Name::Lse, lse.to_f32()));
            [(Name::O, out.o.to_f32())].into_iter().chain(lse).collect()
        };
        let passed = self.truth.judge(&given).passed();
        if passed { Ok(()) } else { Err("the numbers are wrong".into()) }
    }

    /// The same where sequences are packed or in pages.
    fn run_placed(&self, device: &Device, placing: &Placing) -> Result<(), String> {
        let placed = self.operands.placed();
        let (signature, dense) = (placed.problem.signature(), self.operands.problem.signature());
        let outputs = || signature.outputs().zip(dense.outputs());
        let mut out: Vec<Guarded> =
            outputs().map(|(of, _)| Guarded::new(of.dtype, placing.arrangement, of.shape)).collect();
        let [o, lse] = &mut out[..] else { unreachable!("o and lse are asked for") };
        let (q, k, v) = (placed.q.view(), placed.k.view(), placed.v.view());
        let (mut o, mut lse) = (o.view_mut(), lse.view_mut());
        let run = placed.attention().run_into(device, &q, &k, &v, &mut o, Some(&mut lse));
        run.map_err(|error| error.to_string())?;
        let taken = outputs().zip(&out).map(|((of, dense), out)| {
            (of.name, placing.take(of, dense, out).gather(self.truth.of(of.name).rows()))
        });
        let given: Vec<(Name, Vec<f32>)> = taken.collect();
        let passed = self.truth.judge(&given).passed();
        if passed { Ok(()) } else { Err("the numbers are wrong".into()) }
    }

    /// Packed sequences of so many queries and keys, or with keys in pages of so many.
    fn placed(of: Problem, lengths: &[(u32, u32)], page: Option<usize>) -> Trial {
        let (queries, keys): (Vec<u32>, Vec<u32>) = lengths.iter().copied().unzip();
        let len_q = queries.iter().copied().max().unwrap_or(0) as usize;
        let total = queries.iter().sum::<u32>() as usize;
        let mut of = of.with_queries(Queries::Packed { total });
        of.len_q = len_q;
        Trial::with_keys(of, queries, keys, page)
    }

    /// Sequences of so many keys, packed or in pages, that all have as many queries.
    fn shared(of: Problem, keys: &[u32], page: Option<usize>) -> Trial {
        Trial::with_keys(of, vec![of.len_q as u32; keys.len()], keys.into(), page)
    }

    fn with_keys(mut of: Problem, queries: Vec<u32>, keys: Vec<u32>, page: Option<usize>) -> Trial {
        of.batch = keys.len();
        let total = |all: &[u32]| all.iter().sum::<u32>() as usize;
        let of = of.with_kv(of.heads_kv, keys.iter().copied().max().unwrap_or(0) as usize);
        let problem = match page {
            None => of.with_keys(Keys::Packed { total: total(&keys) }),
            Some(page) => {
                of.with_keys(Keys::Paged { page, pages: placing::pool(&keys, page) }).with_key_lengths()
            }
        };
        let placing = Placing::new(problem, Arrangement::Bshd, queries, keys.clone(), 7);
        let dense = Placing::dense(problem);
        let operands = Operands::draw(dense, Some(keys), Arrangement::Bhsd, Distribution::Normal, 7);
        let operands = operands.with_placing(placing);
        Trial { truth: operands.yardstick(), operands }
    }
}

fn problem(batch: usize, heads: usize, len: usize, head_dim: usize) -> Problem {
    Problem::new(batch, heads, len, head_dim, DType::F16).with_lse()
}

/// Tails, empty rows, windows, groups, key lengths.
pub fn ampere() -> Vec<Trial> {
    let window = Mask::Window { left: Some(150), right: Some(10) };
    vec![
        Trial::new(problem(1, 2, 101, 64).with_kv(1, 300).with_mask(Mask::Causal), None),
        Trial::new(problem(1, 1, 500, 64).with_head_dim_v(72).with_mask(window), None),
        Trial::new(problem(3, 1, 70, 64).with_kv(1, 130).with_key_lengths(), Some(vec![130, 37, 0])),
        Trial::new(problem(1, 1, 130, 8).with_kv(1, 65).with_mask(Mask::Causal), None),
        Trial::new(problem(1, 1, 128, 96).with_kv(1, 384), None),
    ]
}

/// Sequences without queries, without keys, of a whole tile, and more of them than a warp has lanes; pages of any size, and
/// such that are some tiles.
pub fn placed() -> Vec<Trial> {
    let few = [(70, 90), (0, 20), (64, 64), (1, 130), (33, 0)];
    let many: Vec<_> = (0..35).map(|i| (i * 7 % 5, i * 5 % 23)).collect();
    let [narrow, wide] = [40, 200].map(|left| Mask::Window { left: Some(left), right: Some(10) });
    let full = [(33, 0), (64, 64), (1, 240)];
    vec![
        Trial::placed(problem(1, 2, 1, 64).with_kv(1, 1).with_mask(Mask::Causal), &few, None),
        // The last sequence has all the pages that the table has room for, and full ones.
        Trial::placed(problem(1, 1, 1, 16).with_head_dim_v(72), &full, Some(20)),
        Trial::placed(problem(1, 1, 1, 64).with_mask(narrow), &few, Some(20)),
        Trial::placed(problem(1, 2, 1, 16).with_mask(Mask::Causal), &many, None),
        Trial::placed(problem(1, 1, 1, 64).with_mask(wide), &[(70, 444), (1, 200), (33, 0)], Some(96)),
        Trial::placed(problem(1, 1, 1, 64).with_mask(Mask::Causal), &[(130, 150), (3, 192)], Some(16)),
    ]
}

/// The same for few queries, in tiles of 16 rows, and keys in steps of 16; of 16 bits and of 8.
pub fn decoding() -> Vec<Trial> {
    let window = Mask::Window { left: Some(50), right: Some(10) };
    let few = [(17, 90), (0, 20), (16, 64), (1, 130), (3, 0)];
    let many: Vec<_> = (0..35).map(|i| (i * 7 % 5, i * 5 % 23)).collect();
    // The last sequences have all the pages that the table has room for, and full ones.
    let [short, full] = [48, 336].map(|len| [(3, 0), (16, 32), (1, len)]);
    let cache = |of: Problem| of.with_dtype_kv(DType::F8E4M3);
    vec![
        Trial::new(problem(1, 6, 5, 64).with_kv(2, 130).with_mask(Mask::Causal), None),
        Trial::new(cache(problem(1, 1, 20, 64).with_kv(1, 300).with_head_dim_v(80).with_mask(window)), None),
        Trial::new(cache(problem(3, 4, 1, 64).with_kv(2, 130).with_key_lengths()), Some(vec![130, 37, 0])),
        Trial::new(cache(problem(1, 1, 16, 256).with_kv(1, 96).with_mask(window)), None),
        Trial::placed(problem(1, 3, 1, 64).with_kv(1, 1).with_mask(Mask::Causal), &few, None),
        Trial::placed(cache(problem(1, 2, 1, 16).with_kv(1, 1).with_mask(Mask::Causal)), &many, None),
        Trial::placed(cache(problem(1, 2, 1, 64).with_kv(2, 1).with_mask(window)), &few, Some(16)),
        Trial::placed(problem(1, 5, 1, 16).with_kv(1, 1).with_head_dim_v(64), &full, Some(16)),
        Trial::placed(cache(problem(1, 5, 1, 16).with_kv(1, 1)), &short, Some(16)),
        Trial::new(problem(1, 1, 3, 64).with_kv(1, 333), None),
    ]
}

/// Sequences of mixed lengths whose keys all blocks share: of no keys and of one, more of them than a warp has lanes, and so few keys
/// that blocks have none; several queries of heads that share keys, and rows of two tiles; shares that end within a sequence,
/// within a head, one place after its start and between two.
pub fn by_length() -> Vec<Trial> {
    let lengths = vec![3, 0, 400, 1, 64];
    let many: Vec<u32> = (0..70).map(|i| if (32..64).contains(&i) { 0 } else { i * 29 % 91 }).collect();
    let decode = |heads, keys| problem(1, heads, 1, 64).with_kv(keys, 1);
    vec![
        Trial::new(
            problem(5, 4, 3, 64).with_kv(2, 400).with_mask(Mask::Causal).with_key_lengths(),
            Some(lengths),
        ),
        Trial::new(problem(2, 1, 70, 16).with_kv(1, 90).with_key_lengths(), Some(vec![90, 33])),
        Trial::new(problem(70, 2, 1, 16).with_kv(1, 91).with_key_lengths(), Some(many)),
        Trial::new(problem(2, 1, 1, 64).with_kv(1, 64).with_key_lengths(), Some(vec![2, 0])),
        // Where parts are said to be, nothing is left over.
        Trial::new(
            problem(16, 2, 1, 16).with_kv(2, 40).with_key_lengths(),
            Some((0..16).map(|i| i * 7 % 41).collect()),
        ),
        Trial::shared(decode(2, 1), &[200, 0, 7, 96], None),
        Trial::shared(decode(4, 2), &[30, 160, 0, 1], Some(48)),
    ]
}

/// The same for gradients: of queries that no key sees and keys that no query sees, too.
pub fn backward() -> Vec<Trial> {
    let window = Mask::Window { left: Some(50), right: Some(10) };
    vec![
        Trial::new(problem(1, 2, 101, 64).with_kv(1, 70).with_mask(Mask::Causal).backward(), None),
        Trial::new(problem(1, 1, 150, 64).with_head_dim_v(72).with_mask(window).backward(), None),
        Trial::new(
            problem(3, 1, 70, 64).with_kv(1, 130).with_key_lengths().backward(),
            Some(vec![130, 37, 0]),
        ),
        Trial::new(problem(1, 2, 96, 8).with_kv(2, 192).backward(), None),
    ]
}

/// The same for tiles of 64 queries and more: more tiles than persistent blocks, so that every slot is used again, and
/// so many keys that each of four blocks that share them uses its slots again; rows and keys that leave a warpgroup or
/// a block without work; windows wider and narrower than a key tile.
pub fn hopper() -> Vec<Trial> {
    let wide = Mask::Window { left: Some(100), right: Some(10) };
    let narrow = Mask::Window { left: Some(19), right: Some(10) };
    let long = Mask::Window { left: Some(170), right: Some(10) };
    let lengths = vec![130, 10, 0, 0, 45, 64];
    vec![
        Trial::new(problem(1, 7, 100, 64).with_kv(1, 130).with_mask(Mask::Causal), None),
        Trial::new(problem(1, 1, 300, 80).with_head_dim_v(96).with_mask(wide), None),
        Trial::new(problem(6, 1, 40, 64).with_kv(1, 130).with_key_lengths(), Some(lengths)),
        Trial::new(problem(1, 1, 70, 64).with_kv(1, 91).with_mask(narrow), None),
        Trial::new(problem(1, 5, 260, 64).with_kv(1, 395).with_mask(Mask::Causal), None),
        Trial::new(problem(1, 1, 70, 64).with_kv(1, 395).with_mask(long), None),
        Trial::new(problem(2, 1, 40, 64).with_kv(1, 200).with_key_lengths(), Some(vec![90, 171])),
        // Sections of heads that end before a round does, and scores that are too large for the short way.
        Trial::new(problem(1, 2, 520, 32).with_kv(1, 460).with_mask(Mask::Causal), None),
        Trial::new(problem(1, 1, 70, 64).with_kv(1, 200).with_scale(1000.0), None),
    ]
}

/// The same for gradients in blocks of 128 keys: several of them, with more steps than slots.
pub fn hopper_backward() -> Vec<Trial> {
    let window = Mask::Window { left: Some(50), right: Some(10) };
    vec![
        Trial::new(problem(1, 2, 330, 64).with_kv(1, 290).with_mask(Mask::Causal).backward(), None),
        Trial::new(problem(1, 1, 300, 40).with_head_dim_v(64).with_mask(window).backward(), None),
        Trial::new(
            problem(3, 1, 270, 64).with_kv(1, 140).with_key_lengths().backward(),
            Some(vec![140, 37, 0]),
        ),
        Trial::new(problem(1, 2, 130, 64).with_kv(2, 192).backward(), None),
        // Keys that only the last query sees, and such that only the first does.
        Trial::new(problem(1, 1, 100, 64).with_kv(1, 129).with_mask(Mask::Causal).backward(), None),
        Trial::new(problem(1, 1, 100, 64).with_kv(1, 277).with_mask(window).backward(), None),
    ]
}

/// The same where the block that adds last rounds: every query sees a key, and there is no left bound.
pub fn hopper_rounds(dim: usize) -> Vec<Trial> {
    let ahead = Mask::Window { left: None, right: Some(37) };
    vec![
        Trial::new(problem(1, 2, 330, dim).with_kv(1, 390).with_mask(Mask::Causal).backward(), None),
        Trial::new(problem(1, 1, 400, dim).with_kv(1, 300).with_head_dim_v(64).backward(), None),
        Trial::new(problem(1, 2, 130, dim).with_kv(2, 256).with_softcap(2.0).backward(), None),
        Trial::new(problem(1, 1, 300, dim).with_mask(ahead).backward(), None),
        // Blocks that begin with the same tile, or with the next one.
        Trial::new(problem(1, 1, 200, dim).with_kv(1, 350).with_mask(Mask::Causal).backward(), None),
        // Keys that only the last query sees, and a single query.
        Trial::new(problem(1, 1, 100, dim).with_kv(1, 129).with_mask(Mask::Causal).backward(), None),
        Trial::new(problem(1, 1, 1, dim).with_kv(1, 130).backward(), None),
    ]
}

/// The same for blocks of 128 queries and of 64 keys.
pub fn hopper_wide() -> Vec<Trial> {
    let window = Mask::Window { left: Some(50), right: Some(10) };
    vec![
        Trial::new(problem(1, 2, 200, 64).with_kv(1, 290).with_mask(Mask::Causal).backward(), None),
        Trial::new(problem(1, 1, 300, 40).with_head_dim_v(72).with_mask(window).backward(), None),
        // The first row behind the last is cleared by one warpgroup, and by the other.
        Trial::new(
            problem(3, 1, 140, 72).with_kv(1, 140).with_key_lengths().backward(),
            Some(vec![140, 59, 0]),
        ),
        Trial::new(problem(1, 1, 130, 64).with_kv(1, 192).with_softcap(2.0).backward(), None),
        // Keys that only the last query sees, and such that only the first does.
        Trial::new(problem(1, 1, 100, 64).with_kv(1, 129).with_mask(Mask::Causal).backward(), None),
        Trial::new(problem(1, 1, 100, 64).with_kv(1, 277).with_mask(window).backward(), None),
    ]
}

/// The ways of running: asynchronous effects late and early, and warps interleaved.
fn configs() -> [Config; 3] {
    // A mutant may wait forever; no honest run here needs a tenth of this. The first finding is enough.
    let config = Config { budget: 4_000_000, threads: 1, max_findings: 1, ..Config::default() };
    [
        config.clone(),
        Config { async_mode: AsyncMode::Early, ..config.clone() },
        Config { async_mode: AsyncMode::Random(3), seed: 5, ..config },
    ]
}
