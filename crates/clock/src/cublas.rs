//! Unfused attention as a peer: two strided-batched cuBLAS products with a softmax of ours between them.
//!
//! This is what attention costs without fusing: scores and probabilities go through memory in the input's dtype, sums are
//! kept in f32. cuBLAS is found at run time; nothing of it is needed to build.
#![allow(unsafe_code)] // Calls a library of C functions on addresses of the GPU's memory.

use std::ffi::{c_int, c_longlong, c_void};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use flashcore::cuda::Cuda;
use flashcore::cuda::driver::{
    self, BoundThread, CaptureMode, DeviceBuffer, DriverError, Function, GraphExec, JitOptions, LaunchConfig,
};
use flashcore::{DType, Mask, Problem};
use flashcore_ptx::{GlobalPtr, KernelParams};
use libloading::Library;

use crate::python::{PYTHON_VARIABLE, python};
use crate::softmax;

/// The name of unfused attention among the peers: two cuBLAS products with a softmax of ours between them.
pub const CUBLAS: &str = "cublas";

/// The environment variable that holds the library's path.
pub const VARIABLE: &str = "FLASHCORE_CUBLAS";
/// Its file names, the newest first.
const NAMES: [&str; 3] = ["libcublas.so.13", "libcublas.so.12", "libcublas.so.11"];
/// Where distributions and CUDA's own installer put it.
const FOLDERS: [&str; 5] = [
    "/usr/local/cuda/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
];
/// Prints where NVIDIA's Python packages keep it.
const PROBE: &str = "import glob, importlib.util
spec = importlib.util.find_spec('nvidia')
for place in (spec.submodule_search_locations or []) if spec else []:
    print('\\n'.join(glob.glob(place + '/*/lib/libcublas.so.1[1-9]')))";
/// Bytes of workspace: what NVIDIA recommends for Hopper; smaller GPUs need less.
const WORKSPACE: usize = 32 << 20;

type Handle = *mut c_void;
type Status = c_int;
type Create = unsafe extern "C" fn(*mut Handle) -> Status;
type Destroy = unsafe extern "C" fn(Handle) -> Status;
type SetStream = unsafe extern "C" fn(Handle, *mut c_void) -> Status;
type SetWorkspace = unsafe extern "C" fn(Handle, *mut c_void, usize) -> Status;
type Gemm = unsafe extern "C" fn(
    Handle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    c_longlong,
    *const c_void,
    c_int,
    c_int,
    c_longlong,
    *const c_void,
    *mut c_void,
    c_int,
    c_int,
    c_longlong,
    c_int,
    c_int,
    c_int,
) -> Status;

// From cublas_api.h and library_types.h.
const OP_N: c_int = 0;
const OP_T: c_int = 1;
const R_16F: c_int = 2;
const R_16BF: c_int = 14;
const COMPUTE_32F: c_int = 68;
const GEMM_DEFAULT: c_int = -1;

/// Where the library is: the one that the environment names, on the loader's path, in the usual folders, or next to the
/// Python that peers run in. Nothing is loaded.
pub fn find() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(VARIABLE).filter(|named| !named.is_empty()) {
        return Some(named.into());
    }
    let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).chain(FOLDERS.map(PathBuf::from)).collect();
    let in_folders = NAMES.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    in_folders.into_iter().find(|file| file.is_file()).or_else(beside_python)
}

fn beside_python() -> Option<PathBuf> {
    let output = Command::new(python())
        .args(["-c", PROBE])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut found: Vec<&str> = text.lines().filter(|line| Path::new(line).is_file()).collect();
    // The highest version, which ends the name.
    found.sort_unstable_by_key(|line| line.rsplit('.').next());
    found.last().map(PathBuf::from)
}

/// The library with a handle of its own.
struct Cublas {
    gemm: Gemm,
    destroy: Destroy,
    handle: Handle,
    /// The code behind the functions.
    _libraries: Vec<Library>,
    workspace: DeviceBuffer,
}

impl Cublas {
    /// Opens the library on a stream of the context that is current.
    fn open(cuda: &Cuda) -> Result<Self, String> {
        let path = find().ok_or_else(|| {
            format!(
                "there is no libcublas here; set {VARIABLE} to one, or {PYTHON_VARIABLE} to a Python that has it"
            )
        })?;
        let mut libraries = Vec::new();
        // libcublas depends on this one; the loader finds it by name once it is loaded.
        let lighter = path.to_string_lossy().replace("libcublas.so", "libcublasLt.so");
        if Path::new(&lighter).is_file() {
            // SAFETY: NVIDIA's library, whose initialisers are meant to run on load.
            libraries.extend(unsafe { Library::new(&lighter) }.ok());
        }
        // SAFETY: as above.
        let library =
            unsafe { Library::new(&path) }.map_err(|error| format!("{}: {error}", path.display()))?;
        let create: Create = function(&library, "cublasCreate_v2")?;
        let destroy: Destroy = function(&library, "cublasDestroy_v2")?;
        let set_stream: SetStream = function(&library, "cublasSetStream_v2")?;
        let set_workspace: SetWorkspace = function(&library, "cublasSetWorkspace_v2")?;
        let gemm: Gemm = function(&library, "cublasGemmStridedBatchedEx")?;
        libraries.push(library);
        let workspace = cuda.context().alloc(WORKSPACE).map_err(say)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the out pointer is a live local.
        check("cublasCreate", unsafe { create(&raw mut handle) })?;
        let cublas = Self { gemm, destroy, handle, _libraries: libraries, workspace };
        // SAFETY: the handle was made above; the stream lives as long as the GPU's worker.
        check("cublasSetStream", unsafe { set_stream(handle, cuda.stream().as_raw()) })?;
        let place = cublas.workspace.address() as *mut c_void;
        // SAFETY: the workspace has that many bytes and lives as long as the handle.
        check("cublasSetWorkspace", unsafe { set_workspace(handle, place, WORKSPACE) })?;
        Ok(cublas)
    }

    /// C = alpha · op(A) · B for each matrix of a batch, column-major, accumulating in f32.
    ///
    /// # Safety
    /// The matrices must hold what their sizes and strides say, and stay until the products are done.
    unsafe fn product(&self, product: &Product) -> Result<(), String> {
        let Product { dtype, transposed, m, n, k, alpha, a, b, c, batch } = *product;
        let kind = match dtype {
            DType::BF16 => R_16BF,
            DType::F16 | DType::F32 | DType::F8E4M3 | DType::I32 => R_16F,
        };
        let beta = 0.0_f32;
        let int = |x: usize| c_int::try_from(x).map_err(|_| "a matrix is too large for cuBLAS".to_string());
        let rows_of_a = if transposed { k } else { m };
        // SAFETY: the caller's promise; alpha and beta are live until the call returns, as the handle reads them from
        // the host.
        let status = unsafe {
            (self.gemm)(
                self.handle,
                if transposed { OP_T } else { OP_N },
                OP_N,
                int(m)?,
                int(n)?,
                int(k)?,
                (&raw const alpha).cast(),
                a as *const c_void,
                kind,
                int(rows_of_a)?,
                (m * k) as c_longlong,
                b as *const c_void,
                kind,
                int(k)?,
                (k * n) as c_longlong,
                (&raw const beta).cast(),
                c as *mut c_void,
                kind,
                int(m)?,
                (m * n) as c_longlong,
                int(batch)?,
                COMPUTE_32F,
                GEMM_DEFAULT,
            )
        };
        check("cublasGemmStridedBatchedEx", status)
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        // SAFETY: made by `open`, destroyed once.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// A batch of column-major products: (m, n) = op(A) of (m, k) times B of (k, n), one after the other in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Product {
    dtype: DType,
    transposed: bool,
    m: usize,
    n: usize,
    k: usize,
    alpha: f32,
    a: u64,
    b: u64,
    c: u64,
    batch: usize,
}

/// Where a call's tensors are: q, k, v and o.
pub type Addresses = [u64; 4];

/// The two products of a problem, given where its tensors and its scores are. Queries of heads that share keys follow
/// each other in memory, and so are rows of one product.
fn products(problem: &Problem, [q, k, v, o]: Addresses, scores: u64) -> [Product; 2] {
    let queries = problem.group() * problem.len_q;
    let batch = problem.batch * problem.heads_kv;
    let dtype = problem.dtype;
    [
        Product {
            dtype,
            transposed: true,
            m: problem.len_k,
            n: queries,
            k: problem.head_dim,
            alpha: problem.scale,
            a: k,
            b: q,
            c: scores,
            batch,
        },
        Product {
            dtype,
            transposed: false,
            m: problem.head_dim_v,
            n: queries,
            k: problem.len_k,
            alpha: 1.0,
            a: v,
            b: scores,
            c: o,
            batch,
        },
    ]
}

/// Unfused attention for one problem.
pub struct Unfused {
    cublas: Cublas,
    softmax: Function,
    config: LaunchConfig,
    scores: DeviceBuffer,
    problem: Problem,
    cuda: Cuda,
    /// cuBLAS works in the context that is current.
    _bound: BoundThread,
}

impl Unfused {
    /// Gets ready for a problem.
    pub fn new(cuda: &Cuda, problem: &Problem) -> Result<Self, String> {
        if !matches!(problem.mask, Mask::None | Mask::Causal) || problem.dtype == DType::F32 {
            return Err("the unfused peer knows f16 and bf16, full and causal".into());
        }
        if problem.len_k > softmax::MOST_KEYS {
            return Err(format!("the unfused peer's softmax takes {} keys at most", softmax::MOST_KEYS));
        }
        let bound = cuda.context().bind_to_thread().map_err(say)?;
        let cublas = Cublas::open(cuda)?;
        let rows = problem.batch * problem.heads_q * problem.len_q;
        let scores = cuda.context().alloc((rows * problem.len_k * 2).max(1)).map_err(say)?;
        let text = softmax::module(problem, cuda.hardware().target).map_err(say)?.to_string();
        let module = driver::Module::from_ptx(cuda.context(), softmax::ENTRY, &text, &JitOptions::default());
        let softmax = module.and_then(|module| module.function(softmax::ENTRY)).map_err(say)?;
        let blocks = u32::try_from(rows).map_err(|_| "too many rows for one launch".to_string())?;
        let config = LaunchConfig::new([blocks, 1, 1], [softmax::threads(problem), 1, 1]);
        Ok(Self { cublas, softmax, config, scores, problem: *problem, cuda: cuda.clone(), _bound: bound })
    }

    /// Queues one call.
    ///
    /// # Safety
    /// The tensors must hold what the problem says, contiguous, and stay until the call is done.
    pub unsafe fn queue(&self, tensors: Addresses) -> Result<(), String> {
        let [scores, output] = products(&self.problem, tensors, self.scores.address());
        let params = softmax::Rows { scores: GlobalPtr(self.scores.address()) }.pack();
        // SAFETY: the caller's promise for the tensors; we own the scores, as large as the problem needs, and the
        // three run one after the other in one stream.
        unsafe {
            self.cublas.product(&scores)?;
            self.softmax.launch(self.cuda.stream(), &self.config, &params).map_err(say)?;
            self.cublas.product(&output)
        }
    }

    /// Records `calls` calls, on the sets of tensors in turn.
    ///
    /// # Safety
    /// As for [`Unfused::queue`], for as long as the graph is replayed.
    pub unsafe fn record(&self, sets: &[Addresses], calls: usize) -> Result<GraphExec, String> {
        let graph = self.cuda.stream().capture(CaptureMode::ThreadLocal, |_| {
            (0..calls).try_for_each(|call| {
                // SAFETY: the caller's promise.
                unsafe { self.queue(sets[call % sets.len()]) }.map_err(Failure)
            })
        });
        let exec = graph.map_err(|failure| failure.0)?.instantiate().map_err(say)?;
        exec.upload(self.cuda.stream()).map_err(say)?;
        Ok(exec)
    }
}

/// Why nothing was recorded.
struct Failure(String);

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Self(error.to_string())
    }
}

fn function<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
    // SAFETY: each caller states the signature that NVIDIA documents for the name.
    unsafe { library.get::<F>(name) }
        .map(|symbol| *symbol)
        .map_err(|error| format!("libcublas lacks {name}: {error}"))
}

fn check(what: &str, status: Status) -> Result<(), String> {
    let name = match status {
        0 => return Ok(()),
        1 => "not initialised",
        3 => "no memory",
        7 => "an invalid value",
        8 => "an unsupported GPU",
        13 => "a failed launch",
        14 => "an internal error",
        15 => "not supported",
        _ => "an error",
    };
    Err(format!("{what}: {name} (status {status})"))
}

fn say(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Products of small matrices on the host, column-major as cuBLAS defines them.
    fn on_host(product: &Product, memory: &mut [f64]) {
        let Product { transposed, m, n, k, alpha, a, b, c, batch, .. } = *product;
        let (a, b, c) = (a as usize, b as usize, c as usize);
        for entry in 0..batch {
            for column in 0..n {
                for row in 0..m {
                    let mut sum = 0.0;
                    for i in 0..k {
                        let of_a = if transposed { row * k + i } else { i * m + row };
                        sum += memory[a + entry * m * k + of_a] * memory[b + entry * k * n + column * k + i];
                    }
                    memory[c + entry * m * n + column * m + row] = f64::from(alpha) * sum;
                }
            }
        }
    }

    #[test]
    fn the_two_products_with_a_softmax_between_them_are_attention_with_shared_heads_too() {
        let problem = Problem::new(2, 4, 3, 8, DType::F16).with_kv(2, 5).with_head_dim_v(6);
        let (nq, nk, nv) = (2 * 4 * 3 * 8, 2 * 2 * 5 * 8, 2 * 2 * 5 * 6);
        let (scores, o) = (nq + nk + nv, nq + nk + nv + 2 * 4 * 3 * 5);
        let mut rng = flashcore_judge::rng::Rng::new(8);
        let mut memory: Vec<f64> = (0..o + 2 * 4 * 3 * 6).map(|_| f64::from(rng.normal() as f32)).collect();
        let inputs: Vec<f32> = memory[..scores].iter().map(|&x| x as f32).collect();
        let addresses = [0, nq, nq + nk, o].map(|place| place as u64);
        let [first, second] = products(&problem, addresses, scores as u64);
        on_host(&first, &mut memory);
        for row in memory[scores..o].chunks_exact_mut(5) {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            for x in row {
                *x = x.exp() / sum;
            }
        }
        on_host(&second, &mut memory);
        let buf = |from: usize, shape: [usize; 4]| {
            let values = &inputs[from..][..shape.iter().product()];
            flashcore::TensorBuf::from_f32(values, shape, DType::F32).unwrap()
        };
        let (q, k, v) = (buf(0, [2, 4, 3, 8]), buf(nq, [2, 2, 5, 8]), buf(nq + nk, [2, 2, 5, 6]));
        let mut in_f32 = problem;
        in_f32.dtype = DType::F32;
        let truth = flashcore::oracle::attention(&in_f32, &q.view(), &k.view(), &v.view(), None);
        for (got, expected) in memory[o..].iter().zip(&truth.o) {
            assert!((got - expected).abs() < 1e-6, "{got} {expected}");
        }
    }

    #[test]
    fn an_error_of_the_library_is_named() {
        assert_eq!(check("x", 0), Ok(()));
        assert!(check("cublasCreate", 3).unwrap_err().contains("no memory"));
    }
}
