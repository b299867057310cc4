/* A libnvidia-ml.so.1 whose GPUs stand in a text file: $TRAINWARDEN_FAKE_NVML, read again at each call, so that faults
 * come while a collector runs. Lines "KEY VALUE"; KEY.GPU goes before KEY:
 *   count 8                            GPUs
 *   mig.2 3                            MIG instances of GPU 2
 *   power.3 250000                     a value (see the calls below for the names; field.<id> for field values)
 *   nvmlDeviceGetPowerUsage.3 15       what a call returns instead of 0; -1: hangs, -2: crashes, -3: writes into
 *                                      whatever files its process has open
 *   type.<field id> 9                  the value type of a field
 * A call that hangs first makes the file $TRAINWARDEN_FAKE_NVML.hangs. It is an old driver: it lacks
 * nvmlDeviceGetTemperatureV, nvmlDeviceGetMarginTemperature and nvmlDeviceGetCurrentClocksEventReasons.
 *
 * gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml.c
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int u32;
typedef unsigned long long u64;
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };

static const char *path(void) { const char *p = getenv("TRAINWARDEN_FAKE_NVML"); return p ? p : "/dev/null"; }

static long long get(const char *key, int gpu, long long otherwise) {
    char word[96], exact[96];
    long long value, found = otherwise;
    FILE *file = fopen(path(), "r");
    snprintf(exact, sizeof exact, "%s.%d", key, gpu);
    while (file && fscanf(file, "%95s %lld", word, &value) == 2) {
        if (!strcmp(word, key)) found = value;
        if (!strcmp(word, exact)) { found = value; break; }
    }
    if (file) fclose(file);
    return found;
}

static int fault(const char *call, int gpu) {
    int code = (int)get(call, gpu, OK);
    if (code == -1) {
        char name[512];
        snprintf(name, sizeof name, "%s.hangs", path());
        FILE *mark = fopen(name, "w");
        if (mark) fclose(mark);
        for (;;) pause();
    }
    if (code == -2) raise(SIGSEGV);
    for (int fd = 1; code == -3 && fd < 16; fd++)
        if (write(fd, "garbage\n", 8) < 0) continue;
    return code;
}

/* A handle is the GPU's number + 1; that of MIG instance m of GPU g is 1000 * (g + 1) + m + 1. */
static int of(void *handle) { long h = (long)handle; return (int)(h >= 1000 ? h / 1000 - 1 : h - 1); }

#define FAULT(gpu) do { int code = fault(__func__, gpu); if (code) return code; } while (0)
#define NUMBER(name, type, key, otherwise)                                                                             \
    int name(void *handle, type *value) { FAULT(of(handle)); *value = (type)get(key, of(handle), otherwise); return OK; }
#define NUMBER_OF(name, type, key, otherwise)                                                                          \
    int name(void *handle, u32 which, type *value) {                                                                   \
        char full[64];                                                                                                 \
        FAULT(of(handle));                                                                                             \
        snprintf(full, sizeof full, "%s%u", key, which);                                                               \
        *value = (type)get(full, of(handle), otherwise);                                                               \
        return OK;                                                                                                     \
    }

int nvmlInitWithFlags(u32 flags) { (void)flags; FAULT(0); return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "words of a newer error"; }

int nvmlSystemGetDriverVersion(char *text, u32 size) { FAULT(0); snprintf(text, size, "450.80.02"); return OK; }
int nvmlDeviceGetCount_v2(u32 *count) { FAULT(0); *count = (u32)get("count", 0, 2); return OK; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, void **handle) {
    FAULT((int)index);
    if ((long long)index >= get("count", 0, 2)) return INVALID;
    *handle = (void *)(long)(index + 1);
    return OK;
}
int nvmlDeviceGetUUID(void *handle, char *text, u32 size) {
    long h = (long)handle;
    FAULT(of(handle));
    if (h >= 1000) snprintf(text, size, "MIG-%d-%ld", of(handle), h % 1000 - 1);
    else snprintf(text, size, "GPU-%lld", get("uuid", of(handle), of(handle)));
    return OK;
}
int nvmlDeviceGetName(void *handle, char *text, u32 size) {
    FAULT(of(handle));
    snprintf(text, size, "%s", get("garbled", of(handle), 0) ? "\xff\xfe" : "NVIDIA Fake 80GB");
    return OK;
}
struct pci { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci) {
    FAULT(of(handle));
    memset(pci, 0, sizeof *pci);
    pci->bus = 0x10 + (u32)of(handle);
    pci->device = 0x1c;
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, u32 *current, u32 *pending) {
    FAULT(of(handle));
    long long instances = get("mig", of(handle), -1);
    if (instances < 0) return NOT_SUPPORTED;
    *current = *pending = instances > 0;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, u32 *count) { FAULT(of(handle)); *count = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, u32 index, void **instance) {
    FAULT(of(handle));
    if ((long long)index >= get("mig", of(handle), 0)) return NOT_FOUND;
    *instance = (void *)((long)handle * 1000 + index + 1);
    return OK;
}

NUMBER_OF(nvmlDeviceGetTemperature, u32, "temperature", 40)
NUMBER(nvmlDeviceGetPowerUsage, u32, "power", 70500)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, u32, "power_limit", 700000)
NUMBER_OF(nvmlDeviceGetClockInfo, u32, "clock", 1410)
NUMBER_OF(nvmlDeviceGetMaxClockInfo, u32, "max_clock", 1980)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, "reasons", 0)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, u32, "pcie_generation", 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, u32, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, u32, "pcie_generation_max", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, u32, "pcie_width_max", 16)
NUMBER_OF(nvmlDeviceGetPcieThroughput, u32, "pcie_throughput", 3)

int nvmlDeviceGetUtilizationRates(void *handle, u32 *rates) {
    FAULT(of(handle));
    rates[0] = (u32)get("utilization", of(handle), 97);
    rates[1] = (u32)get("memory_utilization", of(handle), 40);
    return OK;
}
struct memory { u32 version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory *memory) {
    FAULT(of(handle));
    memory->reserved = 1ull << 29;
    memory->used = (u64)get("memory_used", of(handle), 5ll << 30);
    memory->total = 80ull << 30;
    memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}
int nvmlDeviceGetRowRemapperHistogram(void *handle, u32 *banks) {
    FAULT(of(handle));
    for (int i = 0; i < 5; i++) banks[i] = i == 0 ? 640 : (u32)i - 1;
    return OK;
}

struct fabric { u32 version; unsigned char cluster[16]; int status; u32 clique; unsigned char state; u32 health; };
int nvmlDeviceGetGpuFabricInfoV(void *handle, struct fabric *fabric) {
    FAULT(of(handle));
    memset(fabric->cluster, (int)get("fabric_cluster", of(handle), 0), sizeof fabric->cluster);
    fabric->status = (int)get("fabric_status", of(handle), OK);
    fabric->clique = (u32)get("fabric_clique", of(handle), 0);
    fabric->state = (unsigned char)get("fabric_state", of(handle), 0);
    return OK;
}

struct field { u32 id, scope; long long timestamp, latency; u32 type; int code; u64 value; };
int nvmlDeviceGetFieldValues(void *handle, int count, struct field *fields) {
    FAULT(of(handle));
    for (int i = 0; i < count; i++) {
        char key[48];
        snprintf(key, sizeof key, "field.%u", fields[i].id);
        long long value = get(key, of(handle), -999);
        fields[i].code = value == -999 ? NOT_SUPPORTED : OK;
        fields[i].value = (u64)value;
        snprintf(key, sizeof key, "type.%u", fields[i].id);
        fields[i].type = (u32)get(key, of(handle), 3);
        snprintf(key, sizeof key, "code.%u", fields[i].id);
        fields[i].code = (int)get(key, of(handle), fields[i].code);
    }
    return OK;
}

int nvmlDeviceGetNvLinkState(void *handle, u32 link, u32 *up) {
    char key[32];
    FAULT(of(handle));
    if ((long long)link >= get("links", of(handle), 0)) return INVALID;
    snprintf(key, sizeof key, "link%u", link);
    *up = (u32)get(key, of(handle), 1);
    return OK;
}
int nvmlDeviceGetNvLinkErrorCounter(void *handle, u32 link, u32 counter, u64 *value) {
    char key[32];
    FAULT(of(handle));
    snprintf(key, sizeof key, "link%u_error%u", link, counter);
    *value = (u64)get(key, of(handle), 0);
    return OK;
}

struct process { u32 pid; u64 memory; u32 instance, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, u32 *count, struct process *processes) {
    FAULT(of(handle));
    u32 there = (u32)get("processes", of(handle), 1);
    if (there && *count < there) { *count = there; return TOO_SMALL; }
    for (u32 i = 0; i < there; i++) processes[i] = (struct process){.pid = 1000 * ((u32)of(handle) + 1) + i};
    *count = there;
    return OK;
}
