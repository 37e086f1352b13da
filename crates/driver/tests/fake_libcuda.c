/* A CUDA driver without a GPU, for the tests of this crate: it keeps "device" memory on the heap, runs copies
 * and fills at once, records launches as text, and hands out its functions as the real one does.
 *
 * Compiled by fake_driver.rs. What varies is set by -D:
 *   VERSION       the CUDA version it claims                        (12080)
 *   PROC_ADDRESS  2: cuGetProcAddress_v2, 1: cuGetProcAddress of 11.3, 0: exports only   (2)
 *   INIT_STATUS   what cuInit answers                               (0)
 *   WITHOUT_LINK  leaves out cuLinkCreate, as a broken library would
 *   CAPABILITY    the compute capability of GPU 0, times ten         (90)
 *   WITHOUT_POOLS the GPUs have no stream-ordered memory
 *   ZEROS         a launch writes zeros over memory that holds nothing but ones, as if it were an output
 *   CRASH_ON      a kernel's name; launching it ends the process
 *   HANG_ON       a kernel's name; launching it never returns
 *   COUNT_CALLS   keeps the names of all functions called; needs -finstrument-functions
 *   USE_CUDA_H    takes the types from NVIDIA's header, so that its compiler checks the signatures below
 */
#define _GNU_SOURCE
#ifdef COUNT_CALLS
#include <dlfcn.h>
#endif
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 12080
#endif
#ifndef PROC_ADDRESS
#define PROC_ADDRESS 2
#endif
#ifndef CAPABILITY
#define CAPABILITY 90
#endif
#ifndef INIT_STATUS
#define INIT_STATUS 0
#endif

#ifdef USE_CUDA_H
#define __CUDA_API_VERSION_INTERNAL /* all layouts, no renaming by macros */
#include <cuda.h>
#else
typedef int CUresult, CUdevice_attribute, CUpointer_attribute, CUjit_option, CUjitInputType;
typedef int CUfunction_attribute, CUstreamCaptureMode, CUstreamCaptureStatus, CUtensorMapDataType;
typedef int CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill;
typedef int CUdriverProcAddressQueryResult, CUdevice;
typedef unsigned long long CUdeviceptr;
typedef uint64_t cuuint64_t;
typedef uint32_t cuuint32_t;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUlinkState_st *CUlinkState;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { cuuint64_t opaque[16]; } CUtensorMap;
typedef union {
    char pad[64];
    struct { unsigned int x, y, z; } clusterDim;
    int programmaticStreamSerializationAllowed;
    int priority;
} CUlaunchAttributeValue;
typedef struct { int id; char pad[4]; CUlaunchAttributeValue value; } CUlaunchAttribute;
typedef struct {
    unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    CUstream hStream;
    CUlaunchAttribute *attrs;
    unsigned int numAttrs;
} CUlaunchConfig;
#endif
#define API __attribute__((visibility("default"))) CUresult

/* --- what the tests look at ------------------------------------------------------------------------- */

static char record[1 << 16];
static int live; /* objects that were made and not yet destroyed */
static char failing[64];
static int failing_status;

/* What does not fit is left out. */
static size_t record_used;
static void note(const char *format, ...) {
    size_t used = record_used;
    if (used + 1 >= sizeof record) return;
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(record + used, sizeof record - used, format, arguments);
    va_end(arguments);
    used += length > 0 ? (size_t)length : 0;
    record_used = used < sizeof record ? used : sizeof record - 1;
}

__attribute__((visibility("default"))) const char *fake_record(void) { return record; }
__attribute__((visibility("default"))) void fake_clear(void) { record[0] = 0; record_used = 0; }
__attribute__((visibility("default"))) int fake_live(void) { return live; }
/* Makes the next call of a function fail. */
__attribute__((visibility("default"))) void fake_fail(const char *function, int status) {
    snprintf(failing, sizeof failing, "%s", function);
    failing_status = status;
}

#ifdef COUNT_CALLS
/* The compiler calls these at the start and at the end of every function. What the fake calls itself is not counted. */
#define UNCOUNTED __attribute__((no_instrument_function))
static char calls[1 << 16];
static _Thread_local int nested;
static pthread_mutex_t calls_lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((visibility("hidden"))) UNCOUNTED void __cyg_profile_func_enter(void *function, void *from) {
    (void)from;
    Dl_info info;
    if (!dladdr(function, &info) || info.dli_saddr != function || strncmp(info.dli_sname, "cu", 2) != 0) return;
    if (nested++ > 0) return;
    pthread_mutex_lock(&calls_lock);
    size_t used = strlen(calls);
    snprintf(calls + used, sizeof calls - used, "%s\n", info.dli_sname);
    pthread_mutex_unlock(&calls_lock);
}
__attribute__((visibility("hidden"))) UNCOUNTED void __cyg_profile_func_exit(void *function, void *from) {
    (void)from;
    Dl_info info;
    if (!dladdr(function, &info) || info.dli_saddr != function || strncmp(info.dli_sname, "cu", 2) != 0) return;
    nested--;
}
__attribute__((visibility("default"))) const char *fake_calls(void) { return calls; }
__attribute__((visibility("default"))) void fake_clear_calls(void) { calls[0] = 0; }
#endif

/* Whether this call was chosen to fail; a name that ends with * means all that begin with it. */
static int fails(const char *function) {
    size_t length = strlen(failing);
    if (length == 0) return 0;
    int same = failing[length - 1] == '*' ? strncmp(failing, function, length - 1) == 0 : strcmp(failing, function) == 0;
    if (same) failing[0] = 0;
    return same;
}
#define MAY_FAIL                                                                                              \
    if (fails(__func__)) return (CUresult)failing_status;

/* --- two GPUs ---------------------------------------------------------------------------------------- */

struct CUctx_st { int device, retained; };
static struct CUctx_st contexts[2] = {{0, 0}, {1, 0}};
static _Thread_local CUcontext stack[16];
static _Thread_local int depth;
static _Thread_local int capture_mode;

static CUcontext current(void) { return depth ? stack[depth - 1] : NULL; }
#define NEEDS_CONTEXT                                                                                         \
    MAY_FAIL                                                                                                  \
    if (!current()) return 201;

/* The context of a GPU, as another library of the process would get it. */
__attribute__((visibility("default"))) void *fake_context(int device) { return &contexts[device]; }
__attribute__((visibility("default"))) void *fake_current(void) { return current(); }

API cuInit(unsigned int flags) { (void)flags; return (CUresult)INIT_STATUS; }
API cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
API cuGetErrorName(CUresult error, const char **text) {
    switch ((int)error) {
    case 1: *text = "CUDA_ERROR_INVALID_VALUE"; return 0;
    case 2: *text = "CUDA_ERROR_OUT_OF_MEMORY"; return 0;
    case 34: *text = "CUDA_ERROR_STUB_LIBRARY"; return 0;
    case 218: *text = "CUDA_ERROR_INVALID_PTX"; return 0;
    case 700: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; return 0;
    default: *text = NULL; return 1;
    }
}
API cuGetErrorString(CUresult error, const char **text) {
    switch ((int)error) {
    case 1: *text = "invalid argument"; return 0;
    case 700: *text = "an illegal memory access was encountered"; return 0;
    default: *text = NULL; return 1;
    }
}
API cuDeviceGetCount(int *count) { *count = 2; return 0; }
API cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return 0; }
API cuDeviceGetName(char *name, int length, CUdevice device) {
    snprintf(name, (size_t)length, "Fake GPU %d", device);
    return 0;
}
API cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { memset(uuid, 0x10 + device, 16); return 0; }
API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { memset(uuid, 0x20 + device, 16); return 0; }
API cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) { (void)device; *bytes = (size_t)1 << 37; return 0; }
API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch ((int)attribute) {
    case 1: *value = 1024; return 0;
    case 8: *value = 49152; return 0;
    case 16: *value = 132; return 0;
    case 39: *value = 2048; return 0;
    case 75: *value = device ? 8 : CAPABILITY / 10; return 0; /* GPU 0 is a Hopper, GPU 1 an Ada */
    case 76: *value = device ? 9 : CAPABILITY % 10; return 0;
    case 81: *value = 233472; return 0;
    case 82: *value = 65536; return 0;
    case 97: *value = 232448; return 0;
#ifdef WITHOUT_POOLS
    case 115: *value = 0; return 0;
#else
    case 115: *value = 1; return 0;
#endif
    case 120: case 127:
        if (VERSION < 12000) return 1; /* an attribute that this driver does not know */
        *value = device == 0;
        return 0;
    default: *value = (int)attribute; return 0;
    }
}
API cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    MAY_FAIL
    *context = &contexts[device];
    contexts[device].retained++;
    live++;
    return 0;
}
API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    if (contexts[device].retained == 0) return 201;
    contexts[device].retained--;
    live--;
    return 0;
}
API cuCtxPushCurrent_v2(CUcontext context) {
    if (depth == 16) return 1;
    stack[depth++] = context;
    note("push\n");
    return 0;
}
API cuCtxPopCurrent_v2(CUcontext *context) {
    if (!depth) return 201;
    *context = stack[--depth];
    note("pop\n");
    return 0;
}
API cuCtxGetCurrent(CUcontext *context) { *context = current(); return 0; }
/* Not used by this crate, but by others that share the process's driver. */
API cuCtxSetCurrent(CUcontext context) {
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return 0;
}
API cuCtxGetDevice(CUdevice *device) { NEEDS_CONTEXT *device = current()->device; return 0; }
API cuCtxSynchronize(void) { NEEDS_CONTEXT return 0; }
API cuCtxGetStreamPriorityRange(int *least, int *greatest) { NEEDS_CONTEXT *least = 0; *greatest = -5; return 0; }

/* --- memory ------------------------------------------------------------------------------------------ */

enum { HOST = 1, DEVICE = 2 };
static struct { char *start; size_t size; int type, device; CUcontext owner; } blocks[64];

/* Held until the end of the function: blocks are made and freed from several threads. */
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static void unlock_blocks(int *unused) { (void)unused; pthread_mutex_unlock(&blocks_lock); }
#define LOCK_BLOCKS                                                                                           \
    pthread_mutex_lock(&blocks_lock);                                                                         \
    __attribute__((cleanup(unlock_blocks))) int locked = 0;                                                   \
    (void)locked;

static CUresult allocate(char **out, size_t bytes, int type, CUcontext owner) {
    if (bytes == 0) return 1;
    if (bytes > (size_t)1 << 30) return 2;
    LOCK_BLOCKS
    for (int i = 0; i < 64; i++) {
        if (!blocks[i].start) {
            blocks[i].start = aligned_alloc(256, (bytes + 255) / 256 * 256);
            memset(blocks[i].start, 0xcd, bytes);
            blocks[i].size = bytes;
            blocks[i].type = type;
            blocks[i].device = current()->device;
            blocks[i].owner = owner;
            *out = blocks[i].start;
            live++;
            return 0;
        }
    }
    return 2;
}
static CUresult release(char *start) {
    LOCK_BLOCKS
    for (int i = 0; i < 64; i++) {
        if (blocks[i].start == start) {
            free(start);
            blocks[i].start = NULL;
            live--;
            return 0;
        }
    }
    return 1;
}
API cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    NEEDS_CONTEXT
    char *start;
    CUresult status = allocate(&start, bytes, DEVICE, current());
    if (!status) *pointer = (CUdeviceptr)(uintptr_t)start;
    return status;
}
API cuMemFree_v2(CUdeviceptr pointer) { NEEDS_CONTEXT return release((char *)(uintptr_t)pointer); }
API cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    NEEDS_CONTEXT
    (void)stream;
    char *start;
    CUresult status = allocate(&start, bytes, DEVICE, NULL); /* pools belong to no context */
    if (!status) *pointer = (CUdeviceptr)(uintptr_t)start;
    return status;
}
API cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    NEEDS_CONTEXT
    note("free in %s\n", stream ? "stream" : "default");
    return release((char *)(uintptr_t)pointer);
}
API cuMemGetInfo_v2(size_t *available, size_t *total) { NEEDS_CONTEXT *available = 123; *total = 456; return 0; }
API cuMemHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
    NEEDS_CONTEXT
    if (flags != 1) return 1;
    return allocate((char **)pointer, bytes, HOST, current());
}
API cuMemFreeHost(void *pointer) { NEEDS_CONTEXT return release(pointer); }
API cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer) {
    NEEDS_CONTEXT
    LOCK_BLOCKS
    int found = -1;
    char *address = (char *)(uintptr_t)pointer;
    for (int i = 0; i < 64; i++)
        if (blocks[i].start && address >= blocks[i].start && address < blocks[i].start + blocks[i].size) found = i;
    for (unsigned int i = 0; i < count; i++) {
        switch ((int)attributes[i]) {
        case 1: *(CUcontext *)data[i] = found < 0 ? NULL : blocks[found].owner; break;
        case 2: *(unsigned int *)data[i] = found < 0 ? 0u : (unsigned int)blocks[found].type; break;
        case 8: *(char *)data[i] = 0; break;
        case 9: *(int *)data[i] = found < 0 ? -2 : blocks[found].device; break;
        case 11: *(char **)data[i] = found < 0 ? NULL : blocks[found].start; break;
        case 12: *(size_t *)data[i] = found < 0 ? 0 : blocks[found].size; break;
        default: return 1;
        }
    }
    return 0;
}

/* --- streams, events, graphs ------------------------------------------------------------------------- */

/* One recorded operation: a copy, or a fill, or a launch (which does nothing). */
struct step { int kind; char *target; const char *source; size_t bytes; unsigned int value; };
enum { COPY, FILL8, FILL32, LAUNCH };
struct CUgraph_st { int count; struct step steps[512]; };
struct CUgraphExec_st { struct CUgraph_st graph; };
struct CUstream_st { CUcontext owner; int priority; unsigned int flags; struct CUgraph_st *capture; };
struct CUevent_st { unsigned int flags; int recorded; int time; };
static int clock_ticks;

/* What a kernel of that name does. */
static void compute(const char *kernel) {
#ifdef ZEROS
    LOCK_BLOCKS
    for (int i = 0; i < 64; i++) {
        if (!blocks[i].start || blocks[i].type != DEVICE) continue;
        size_t ones = 0;
        while (ones < blocks[i].size && blocks[i].start[ones] == (char)0xff) ones++;
        if (ones == blocks[i].size) memset(blocks[i].start, 0, ones);
    }
#endif
#ifdef CRASH_ON
    if (strcmp(kernel, CRASH_ON) == 0) abort();
#endif
#ifdef HANG_ON
    while (strcmp(kernel, HANG_ON) == 0) pause();
#endif
    (void)kernel;
}
static void run(const struct step *step) {
    if (step->kind == LAUNCH) compute(step->source);
    if (step->kind == COPY) memcpy(step->target, step->source, step->bytes);
    if (step->kind == FILL8) memset(step->target, (int)step->value, step->bytes);
    if (step->kind == FILL32)
        for (size_t i = 0; i < step->bytes / 4; i++) memcpy(step->target + 4 * i, &step->value, 4);
    clock_ticks++;
}
static CUresult queue(CUstream stream, struct step step) {
    if (stream && stream->capture) {
        if (stream->capture->count == 512) return 901;
        stream->capture->steps[stream->capture->count++] = step;
    } else {
        run(&step);
    }
    return 0;
}

API cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    NEEDS_CONTEXT
    *stream = calloc(1, sizeof **stream);
    (*stream)->owner = current();
    (*stream)->priority = priority;
    (*stream)->flags = flags;
    note("stream flags %u priority %d\n", flags, priority);
    live++;
    return 0;
}
API cuStreamCreate(CUstream *stream, unsigned int flags) { return cuStreamCreateWithPriority(stream, flags, 0); }
API cuStreamDestroy_v2(CUstream stream) { NEEDS_CONTEXT free(stream); live--; return 0; }
API cuStreamSynchronize(CUstream stream) { NEEDS_CONTEXT return stream && stream->capture ? 900 : 0; }
API cuStreamQuery(CUstream stream) { NEEDS_CONTEXT (void)stream; return 0; }
API cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    NEEDS_CONTEXT
    (void)stream;
    (void)event; /* one that was never recorded is passed already */
    return flags == 0 ? 0 : 1;
}
API cuStreamGetCtx(CUstream stream, CUcontext *context) {
    NEEDS_CONTEXT
    *context = stream ? stream->owner : current();
    return 0;
}
API cuStreamGetPriority(CUstream stream, int *priority) {
    NEEDS_CONTEXT
    *priority = stream ? stream->priority : 0;
    return 0;
}
API cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    NEEDS_CONTEXT
    if (!stream) return 900;
    if (stream->capture) return 401;
    note("capture mode %d\n", (int)mode);
    stream->capture = calloc(1, sizeof *stream->capture);
    live++;
    return 0;
}
API cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    NEEDS_CONTEXT
    if (!stream->capture) return 401;
    *graph = stream->capture;
    stream->capture = NULL;
    return 0;
}
API cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    NEEDS_CONTEXT
    *status = stream && stream->capture ? 1 : 0;
    return 0;
}
API cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    int old = capture_mode;
    capture_mode = (int)*mode;
    *mode = (CUstreamCaptureMode)old;
    return 0;
}
__attribute__((visibility("default"))) int fake_capture_mode(void) { return capture_mode; }
API cuEventCreate(CUevent *event, unsigned int flags) {
    NEEDS_CONTEXT
    *event = calloc(1, sizeof **event);
    (*event)->flags = flags;
    live++;
    return 0;
}
API cuEventDestroy_v2(CUevent event) { NEEDS_CONTEXT free(event); live--; return 0; }
API cuEventRecord(CUevent event, CUstream stream) {
    NEEDS_CONTEXT
    (void)stream;
    event->recorded = 1;
    event->time = clock_ticks;
    return 0;
}
API cuEventQuery(CUevent event) { NEEDS_CONTEXT return event->recorded ? 0 : 600; }
API cuEventSynchronize(CUevent event) { NEEDS_CONTEXT (void)event; return 0; }
API cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
    NEEDS_CONTEXT
    if (start->flags & 2 || end->flags & 2) return 400;
    *ms = (float)(end->time - start->time);
    return 0;
}
API cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t bytes, CUstream stream) {
    NEEDS_CONTEXT
    return queue(stream, (struct step){COPY, (char *)(uintptr_t)target, source, bytes, 0});
}
API cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t bytes, CUstream stream) {
    NEEDS_CONTEXT
    return queue(stream, (struct step){COPY, target, (char *)(uintptr_t)source, bytes, 0});
}
API cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
    NEEDS_CONTEXT
    return queue(stream, (struct step){COPY, (char *)(uintptr_t)target, (char *)(uintptr_t)source, bytes, 0});
}
API cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t count, CUstream stream) {
    NEEDS_CONTEXT
    return queue(stream, (struct step){FILL8, (char *)(uintptr_t)target, NULL, count, value});
}
API cuMemsetD32Async(CUdeviceptr target, unsigned int value, size_t count, CUstream stream) {
    NEEDS_CONTEXT
    return queue(stream, (struct step){FILL32, (char *)(uintptr_t)target, NULL, 4 * count, value});
}
API cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    if (nodes) return 1;
    *count = (size_t)graph->count;
    return 0;
}
API cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    NEEDS_CONTEXT
    if (flags) return 1;
    *exec = calloc(1, sizeof **exec);
    (*exec)->graph = *graph;
    live++;
    return 0;
}
API cuGraphUpload(CUgraphExec exec, CUstream stream) { NEEDS_CONTEXT (void)exec; (void)stream; note("upload\n"); return 0; }
API cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    NEEDS_CONTEXT
    (void)stream;
    for (int i = 0; i < exec->graph.count; i++) run(&exec->graph.steps[i]);
    return 0;
}
API cuGraphExecDestroy(CUgraphExec exec) { NEEDS_CONTEXT free(exec); live--; return 0; }
API cuGraphDestroy(CUgraph graph) { NEEDS_CONTEXT free(graph); live--; return 0; }

/* --- modules ------------------------------------------------------------------------------------------ */

/* A "module" is its text. A line `// params: 0+8 8+4` gives offsets and sizes; the word BROKEN does not
 * assemble. A "cubin" is an empty ELF header with the text behind it. */
enum { ELF_HEADER = 64 };
struct CUfunc_st { char name[64]; int dynamic_shared; const char *text; CUcontext owner; };
struct CUmod_st { char *text; struct CUfunc_st functions[16]; int count; CUcontext owner; };
struct CUlinkState_st { unsigned int count; CUjit_option *keys; void **values; char *image; size_t size; };

static CUresult assemble(const char *text, unsigned int count, CUjit_option *keys, void **values) {
    char *buffers[2] = {NULL, NULL};
    size_t sizes[2] = {0, 0};
    int verbose = 0;
    for (unsigned int i = 0; i < count; i++) {
        switch ((int)keys[i]) {
        case 0: note("jit max registers %u\n", (unsigned int)(uintptr_t)values[i]); break;
        case 2: { float ms = 1.5f; memcpy(&values[i], &ms, sizeof ms); break; }
        case 3: buffers[0] = values[i]; break;
        case 4: sizes[0] = (size_t)(uintptr_t)values[i]; break;
        case 5: buffers[1] = values[i]; break;
        case 6: sizes[1] = (size_t)(uintptr_t)values[i]; break;
        case 7: note("jit level %u\n", (unsigned int)(uintptr_t)values[i]); break;
        case 12: verbose = (int)(uintptr_t)values[i]; break;
        case 13: note("jit line info %u\n", (unsigned int)(uintptr_t)values[i]); break;
        default: return 1;
        }
    }
    if (strstr(text, "BROKEN")) {
        snprintf(buffers[1], sizes[1], "ptxas application ptx input, line 3; error : Unknown symbol 'BROKEN'");
        return 218;
    }
    if (verbose) snprintf(buffers[0], sizes[0], "ptxas info : Used 8 registers");
    return 0;
}
API cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *keys, void **values) {
    NEEDS_CONTEXT
    const char *text = image;
    if (memcmp(text, "\177ELF", 4) == 0) text += ELF_HEADER;
    else {
        CUresult status = assemble(text, count, keys, values);
        if (status) return status;
    }
    *module = calloc(1, sizeof **module);
    (*module)->text = strdup(text);
    (*module)->owner = current();
    live++;
    return 0;
}
API cuModuleUnload(CUmodule module) { NEEDS_CONTEXT free(module->text); free(module); live--; return 0; }
API cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    NEEDS_CONTEXT
    char entry[80];
    snprintf(entry, sizeof entry, ".entry %s", name);
    if (!strstr(module->text, entry)) return 500;
    for (int i = 0; i < module->count; i++) {
        if (strcmp(module->functions[i].name, name) == 0) {
            *function = &module->functions[i];
            return 0;
        }
    }
    struct CUfunc_st *made = &module->functions[module->count++];
    snprintf(made->name, sizeof made->name, "%s", name);
    made->dynamic_shared = 49152 - 1024;
    made->text = module->text;
    made->owner = module->owner;
    *function = made;
    return 0;
}
#ifndef WITHOUT_LINK
API cuLinkCreate_v2(unsigned int count, CUjit_option *keys, void **values, CUlinkState *state) {
    NEEDS_CONTEXT
    *state = calloc(1, sizeof **state);
    (*state)->count = count;
    (*state)->keys = keys; /* kept, as the real one does */
    (*state)->values = values;
    live++;
    return 0;
}
#endif
API cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name,
                     unsigned int count, CUjit_option *keys, void **values) {
    MAY_FAIL
    (void)keys;
    (void)values;
    const char *text = data;
    if (type != 1 || count != 0 || text[size - 1] != 0) return 1;
    note("link %s\n", name);
    CUresult status = assemble(text, state->count, state->keys, state->values);
    if (status) return status;
    state->size = ELF_HEADER + size;
    state->image = calloc(1, state->size);
    memcpy(state->image, "\177ELF\2\1", 6);
    state->image[18] = (char)190; /* code for a GPU */
    memcpy(state->image + ELF_HEADER, text, size);
    return 0;
}
API cuLinkComplete(CUlinkState state, void **cubin, size_t *size) {
    MAY_FAIL
    *cubin = state->image;
    *size = state->size;
    return 0;
}
API cuLinkDestroy(CUlinkState state) { free(state->image); free(state); live--; return 0; }
API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    NEEDS_CONTEXT
    switch ((int)attribute) {
    case 0: *value = 768; return 0;
    case 1: *value = 1024; return 0;
    case 4: *value = 8; return 0;
    case 8: *value = function->dynamic_shared; return 0;
    default: *value = 100 + (int)attribute; return 0;
    }
}
API cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    NEEDS_CONTEXT
    note("attribute %d = %d\n", (int)attribute, value);
    if (attribute == 8) function->dynamic_shared = value;
    return 0;
}
API cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
    const char *at = strstr(function->text, "// params:");
    if (!at) return 1;
    at += strlen("// params:");
    for (size_t i = 0;; i++) {
        int length = 0;
        if (sscanf(at, "%zu+%zu%n", offset, size, &length) != 2) return 1;
        if (i == index) return 0;
        at += length;
    }
}
API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int threads, size_t shared,
                                                         unsigned int flags) {
    NEEDS_CONTEXT
    (void)function;
    note("occupancy %d threads %zu bytes flags %u\n", threads, shared, flags);
    *blocks = 2048 / threads;
    return 0;
}

/* --- launches ----------------------------------------------------------------------------------------- */

static CUresult launch(const char *how, CUfunction function, const CUlaunchConfig *config, void **pointers, void **extra) {
    if (pointers && extra) return 1;
    if (function->owner != current()) return 400;
    note("%s %s grid %u,%u,%u block %u,%u,%u shared %u\n", how, function->name, config->gridDimX, config->gridDimY,
         config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ, config->sharedMemBytes);
    for (unsigned int i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttributeValue *value = &config->attrs[i].value;
        switch ((int)config->attrs[i].id) {
        case 4: note("  cluster %u,%u,%u\n", value->clusterDim.x, value->clusterDim.y, value->clusterDim.z); break;
        case 6: note("  programmatic %d\n", value->programmaticStreamSerializationAllowed); break;
        case 8: note("  priority %d\n", value->priority); break;
        default: return 1;
        }
    }
    const unsigned char *bytes = NULL;
    size_t size = 0;
    for (; extra && *extra; extra += 2) {
        if (extra[0] == (void *)1) bytes = extra[1];
        else if (extra[0] == (void *)2) size = *(size_t *)extra[1];
        else return 1;
    }
    note("  params");
    for (size_t i = 0; i < size; i++) note(" %02x", bytes[i]);
    size_t offset, length;
    for (size_t field = 0; pointers && !cuFuncGetParamInfo(function, field, &offset, &length); field++)
        for (size_t i = 0; i < length; i++) note(" %02x", ((const unsigned char *)pointers[field])[i]);
    /* For a kernel that does not report its parameters, the first word. */
    if (pointers && cuFuncGetParamInfo(function, 0, &offset, &length))
        for (size_t i = 0; i < 8; i++) note(" %02x", ((const unsigned char *)pointers[0])[i]);
    note("\n");
    return queue(config->hStream, (struct step){LAUNCH, NULL, function->name, 0, 0});
}
API cuLaunchKernel(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                   unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **pointers, void **extra) {
    NEEDS_CONTEXT
    CUlaunchConfig config = {gx, gy, gz, bx, by, bz, shared, stream, NULL, 0};
    return launch("launch", function, &config, pointers, extra);
}
API cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **pointers, void **extra) {
    NEEDS_CONTEXT
    return launch("launch ex", function, config, pointers, extra);
}
API cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    NEEDS_CONTEXT
    (void)function;
    if (config->numAttrs != 1 || config->attrs[0].id != 4) return 1;
    *clusters = 132 / (int)config->attrs[0].value.clusterDim.x;
    return 0;
}
API cuOccupancyMaxPotentialClusterSize(int *size, CUfunction function, const CUlaunchConfig *config) {
    NEEDS_CONTEXT
    (void)function;
    if (config->numAttrs != 0) return 1;
    *size = 8;
    return 0;
}
API cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                           const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                           const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    NEEDS_CONTEXT
    if ((uintptr_t)map % 64) return 1;
    note("map type %d rank %u address %p interleave %d swizzle %d promotion %d fill %d\n", (int)type, rank, address,
         (int)interleave, (int)swizzle, (int)promotion, (int)fill);
    for (cuuint32_t i = 0; i < rank; i++)
        note("  %llu stride %llu box %u step %u\n", (unsigned long long)dims[i],
             i ? (unsigned long long)strides[i - 1] : 0ull, box[i], steps[i]);
    memset(map, 0x5a, sizeof *map);
    return 0;
}

/* --- handing out functions ---------------------------------------------------------------------------- */

#if PROC_ADDRESS > 0
/* Represents a signature of another version than the one declared: calling it is a mistake. */
static CUresult wrong_layout(void) { note("WRONG LAYOUT\n"); return 999; }

#define ROW(base, version, function) {base, version, (void *)function}
static const struct { const char *base; int version; void *function; } rows[] = {
    ROW("cuMemAlloc", 2000, wrong_layout), ROW("cuMemFree", 2000, wrong_layout),
    ROW("cuMemGetInfo", 2000, wrong_layout), ROW("cuDeviceTotalMem", 2000, wrong_layout),
    ROW("cuCtxSynchronize", 13000, wrong_layout), ROW("cuCtxGetDevice", 13000, wrong_layout),
    ROW("cuStreamGetCtx", 12050, wrong_layout), ROW("cuStreamBeginCapture", 10000, wrong_layout),
    ROW("cuMemcpyHtoDAsync", 2000, wrong_layout), ROW("cuMemcpyDtoHAsync", 2000, wrong_layout),
    ROW("cuMemcpyDtoDAsync", 3000, wrong_layout), ROW("cuLinkCreate", 5050, wrong_layout),
    ROW("cuLinkAddData", 5050, wrong_layout), ROW("cuDevicePrimaryCtxRelease", 7000, wrong_layout),
    ROW("cuInit", 2000, cuInit), ROW("cuDriverGetVersion", 2020, cuDriverGetVersion),
    ROW("cuGetErrorName", 6000, cuGetErrorName), ROW("cuGetErrorString", 6000, cuGetErrorString),
    ROW("cuDeviceGetCount", 2000, cuDeviceGetCount), ROW("cuDeviceGet", 2000, cuDeviceGet),
    ROW("cuDeviceGetName", 2000, cuDeviceGetName), ROW("cuDeviceGetUuid", 9020, cuDeviceGetUuid),
    ROW("cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2), ROW("cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2),
    ROW("cuDeviceGetAttribute", 2000, cuDeviceGetAttribute),
    ROW("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain),
    ROW("cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2),
    ROW("cuCtxPushCurrent", 4000, cuCtxPushCurrent_v2), ROW("cuCtxPopCurrent", 4000, cuCtxPopCurrent_v2),
    ROW("cuCtxGetCurrent", 4000, cuCtxGetCurrent), ROW("cuCtxGetDevice", 2000, cuCtxGetDevice),
    ROW("cuCtxSynchronize", 2000, cuCtxSynchronize),
    ROW("cuCtxGetStreamPriorityRange", 5050, cuCtxGetStreamPriorityRange),
    ROW("cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority),
    ROW("cuStreamDestroy", 4000, cuStreamDestroy_v2), ROW("cuStreamSynchronize", 2000, cuStreamSynchronize),
    ROW("cuStreamQuery", 2000, cuStreamQuery), ROW("cuStreamWaitEvent", 3020, cuStreamWaitEvent),
    ROW("cuStreamGetCtx", 9020, cuStreamGetCtx), ROW("cuStreamGetPriority", 5050, cuStreamGetPriority),
    ROW("cuStreamBeginCapture", 10010, cuStreamBeginCapture_v2), ROW("cuStreamEndCapture", 10000, cuStreamEndCapture),
    ROW("cuStreamIsCapturing", 10000, cuStreamIsCapturing),
    ROW("cuThreadExchangeStreamCaptureMode", 10010, cuThreadExchangeStreamCaptureMode),
    ROW("cuEventCreate", 2000, cuEventCreate), ROW("cuEventDestroy", 4000, cuEventDestroy_v2),
    ROW("cuEventRecord", 2000, cuEventRecord), ROW("cuEventQuery", 2000, cuEventQuery),
    ROW("cuEventSynchronize", 2000, cuEventSynchronize), ROW("cuEventElapsedTime", 2000, cuEventElapsedTime),
    ROW("cuMemAlloc", 3020, cuMemAlloc_v2), ROW("cuMemFree", 3020, cuMemFree_v2),
    ROW("cuMemGetInfo", 3020, cuMemGetInfo_v2), ROW("cuMemHostAlloc", 2020, cuMemHostAlloc),
    ROW("cuMemFreeHost", 2000, cuMemFreeHost), ROW("cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync_v2),
    ROW("cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync_v2), ROW("cuMemcpyDtoDAsync", 3020, cuMemcpyDtoDAsync_v2),
    ROW("cuMemsetD8Async", 3020, cuMemsetD8Async), ROW("cuMemsetD32Async", 3020, cuMemsetD32Async),
    ROW("cuPointerGetAttributes", 7000, cuPointerGetAttributes),
    ROW("cuModuleLoadDataEx", 2010, cuModuleLoadDataEx), ROW("cuModuleUnload", 2000, cuModuleUnload),
    ROW("cuModuleGetFunction", 2000, cuModuleGetFunction),
#ifndef WITHOUT_LINK
    ROW("cuLinkCreate", 6050, cuLinkCreate_v2),
#endif
    ROW("cuLinkAddData", 6050, cuLinkAddData_v2), ROW("cuLinkComplete", 5050, cuLinkComplete),
    ROW("cuLinkDestroy", 5050, cuLinkDestroy), ROW("cuFuncGetAttribute", 2020, cuFuncGetAttribute),
    ROW("cuFuncSetAttribute", 9000, cuFuncSetAttribute),
    ROW("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", 7000,
        cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags),
    ROW("cuLaunchKernel", 4000, cuLaunchKernel), ROW("cuGraphGetNodes", 10000, cuGraphGetNodes),
    ROW("cuGraphLaunch", 10000, cuGraphLaunch), ROW("cuGraphExecDestroy", 10000, cuGraphExecDestroy),
    ROW("cuGraphDestroy", 10000, cuGraphDestroy), ROW("cuMemAllocAsync", 11020, cuMemAllocAsync),
    ROW("cuMemFreeAsync", 11020, cuMemFreeAsync),
    ROW("cuGraphInstantiateWithFlags", 11040, cuGraphInstantiateWithFlags),
    ROW("cuGraphUpload", 11010, cuGraphUpload), ROW("cuLaunchKernelEx", 11060, cuLaunchKernelEx),
    ROW("cuOccupancyMaxActiveClusters", 11070, cuOccupancyMaxActiveClusters),
    ROW("cuOccupancyMaxPotentialClusterSize", 11070, cuOccupancyMaxPotentialClusterSize),
    ROW("cuFuncGetParamInfo", 12040, cuFuncGetParamInfo),
    ROW("cuTensorMapEncodeTiled", 12000, cuTensorMapEncodeTiled),
};

/* The newest signature that is not newer than `version`; a version newer than the driver is refused. */
static CUresult find(const char *base, void **function, int version) {
    *function = NULL;
    if (version > VERSION) return 1;
    int best = -1;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (strcmp(rows[i].base, base) == 0 && rows[i].version <= version && rows[i].version > best) {
            best = rows[i].version;
            *function = rows[i].function;
        }
    }
    return 0;
}
#endif
#if PROC_ADDRESS == 2
API cuGetProcAddress_v2(const char *base, void **function, int version, cuuint64_t flags,
                        CUdriverProcAddressQueryResult *status) {
    if (flags != 1) return 1;
    CUresult result = find(base, function, version);
    if (status) *status = *function ? 0 : 1;
    return result;
}
#elif PROC_ADDRESS == 1
API cuGetProcAddress(const char *base, void **function, int version, cuuint64_t flags) {
    return flags == 1 ? find(base, function, version) : 1;
}
#endif
