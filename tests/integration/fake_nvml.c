/* A shared library with NVML's symbols, for tests of the collector through the real pynvml.
 *
 * What it answers is in the text file named by FAKE_NVML_CONTROL, read at init and at each count
 * of the devices, one statement a line (I is a device index):
 *   device NAME MEMORY_MIB POWER_LIMIT_W   adds a device (spaces in NAME as '_')
 *   uuid I HEX | name I HEX                its UUID or name as raw bytes
 *   fault I CODE AFTER                     every call answers CODE, after AFTER good ones
 *   field I FIELD CODE                     calls of one field answer CODE
 *   hide I                                 not counted any more
 *   node CODE                              every call answers CODE
 *   process I PID BYTES | grow I N         a process; N answers "insufficient size" before it
 *   xid I NUMBER                           one event (once per number)
 *   ecc I N | throttle I BITS | mig I | remap I PENDING FAILED | recovery I ACTION
 * -DOLD_DRIVER leaves out what drivers before 510 lack, -DANCIENT_DRIVER also the _v2 lists.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       TIMEOUT = 10 };
enum { DEVICES = 8, PROCESSES = 16, FIELDS = 16, XIDS = 16 };

typedef struct {
    char uuid[96], name[96];
    unsigned long long memory;
    unsigned power_limit_mw, fault_code, fault_after, calls;
    int hidden, mig, watched, grow;
    unsigned ecc, remap_pending, remap_failed, recovery;
    unsigned long long throttle;
    struct { char name[24]; unsigned code; } fields[FIELDS];
    int field_count;
    struct { unsigned pid; unsigned long long memory; } processes[PROCESSES];
    int process_count;
} Device;

static Device devices[DEVICES];
static int device_count;
static unsigned node_code;
static char loaded[8192];
static struct { int device; unsigned number; int taken; } xids[XIDS];
static int xid_count;

static void unhex(const char *hex, char *to, size_t size) {
    size_t length = 0;
    unsigned byte;
    memset(to, 0, size);
    while (length < size - 1 && sscanf(hex + 2 * length, "%2x", &byte) == 1)
        to[length++] = (char)byte;
}

static void add_xid(int device, unsigned number) {
    for (int i = 0; i < xid_count; i++)
        if (xids[i].device == device && xids[i].number == number) return;
    xids[xid_count].device = device;
    xids[xid_count].number = number;
    xids[xid_count++].taken = 0;
}

static void add_device(const char *name, unsigned long long mib, unsigned limit_w, int watched) {
    Device *d = &devices[device_count];
    memset(d, 0, sizeof *d);
    snprintf(d->uuid, sizeof d->uuid, "GPU-%08d-fake", device_count);
    snprintf(d->name, sizeof d->name, "%.95s", name);
    for (char *c = d->name; *c; c++) if (*c == '_') *c = ' ';
    d->memory = mib << 20;
    d->power_limit_mw = limit_w * 1000;
    d->watched = watched;
    device_count++;
}

static void statement(const char *line, const int *watched) {
    char word[200];
    int i;
    unsigned a, b;
    unsigned long long n;
    if (sscanf(line, "device %199s %llu %u", word, &n, &a) == 3)
        add_device(word, n, a, watched[device_count]);
    else if (sscanf(line, "uuid %d %199s", &i, word) == 2)
        unhex(word, devices[i].uuid, sizeof devices[i].uuid);
    else if (sscanf(line, "name %d %199s", &i, word) == 2)
        unhex(word, devices[i].name, sizeof devices[i].name);
    else if (sscanf(line, "fault %d %u %u", &i, &a, &b) == 3)
        devices[i].fault_code = a, devices[i].fault_after = b;
    else if (sscanf(line, "field %d %199s %u", &i, word, &a) == 3) {
        Device *d = &devices[i];
        snprintf(d->fields[d->field_count].name, 24, "%.23s", word);
        d->fields[d->field_count++].code = a;
    } else if (sscanf(line, "hide %d", &i) == 1) devices[i].hidden = 1;
    else if (sscanf(line, "node %u", &a) == 1) node_code = a;
    else if (sscanf(line, "process %d %u %llu", &i, &a, &n) == 3) {
        Device *d = &devices[i];
        d->processes[d->process_count].pid = a;
        d->processes[d->process_count++].memory = n;
    } else if (sscanf(line, "grow %d %u", &i, &a) == 2) devices[i].grow = (int)a;
    else if (sscanf(line, "xid %d %u", &i, &a) == 2) add_xid(i, a);
    else if (sscanf(line, "ecc %d %u", &i, &a) == 2) devices[i].ecc = a;
    else if (sscanf(line, "throttle %d %llu", &i, &n) == 2) devices[i].throttle = n;
    else if (sscanf(line, "mig %d", &i) == 1) devices[i].mig = 1;
    else if (sscanf(line, "remap %d %u %u", &i, &a, &b) == 3)
        devices[i].remap_pending = a, devices[i].remap_failed = b;
    else if (sscanf(line, "recovery %d %u", &i, &a) == 2) devices[i].recovery = a;
}

static void load(void) {
    char text[sizeof loaded];
    int watched[DEVICES];
    FILE *file = fopen(getenv("FAKE_NVML_CONTROL"), "r");
    size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) fclose(file);
    text[length] = 0;
    if (strcmp(text, loaded) == 0) return;
    strcpy(loaded, text);
    for (int i = 0; i < DEVICES; i++) watched[i] = devices[i].watched;
    device_count = 0;
    node_code = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
        statement(line, watched);
}

static unsigned strike(Device *d, const char *field) {
    if (node_code) return node_code;
    if (d->fault_code && d->calls++ >= d->fault_after) return d->fault_code;
    for (int i = 0; i < d->field_count; i++)
        if (strcmp(d->fields[i].name, field) == 0) return d->fields[i].code;
    return OK;
}

#define STRIKE(device, field) do { \
    unsigned code = strike(device, field); \
    if (code) return code; \
} while (0)

unsigned nvmlInitWithFlags(unsigned flags) { (void)flags; load(); return node_code; }
unsigned nvmlShutdown(void) {
    for (int i = 0; i < DEVICES; i++) devices[i].watched = 0;
    return node_code;
}
const char *nvmlErrorString(unsigned code) {
    static char text[32];
    snprintf(text, sizeof text, "fake error %u", code);
    return text;
}
unsigned nvmlSystemGetDriverVersion(char *to, unsigned size) {
    snprintf(to, size, "550.54.15");
    return node_code;
}
unsigned nvmlSystemGetCudaDriverVersion_v2(int *to) { *to = 12040; return node_code; }

unsigned nvmlDeviceGetCount_v2(unsigned *to) {
    load();
    *to = 0;
    for (int i = 0; i < device_count; i++) *to += !devices[i].hidden;
    return node_code;
}
unsigned nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **to) {
    for (int i = 0; i < device_count; i++)
        if (!devices[i].hidden && index-- == 0) {
            *to = &devices[i];
            STRIKE(*to, "handle");
            return OK;
        }
    return INVALID_ARGUMENT;
}
unsigned nvmlDeviceGetUUID(Device *d, char *to, unsigned size) {
    STRIKE(d, "uuid");
    memcpy(to, d->uuid, size < sizeof d->uuid ? size : sizeof d->uuid);
    return OK;
}
unsigned nvmlDeviceGetName(Device *d, char *to, unsigned size) {
    STRIKE(d, "name");
    memcpy(to, d->name, size < sizeof d->name ? size : sizeof d->name);
    return OK;
}
typedef struct { char legacy[16]; unsigned domain, bus, device, ids, sub; char id[32]; } Pci;
unsigned nvmlDeviceGetPciInfo_v3(Device *d, Pci *to) {
    STRIKE(d, "pci");
    memset(to, 0, sizeof *to);
    snprintf(to->id, sizeof to->id, "00000000:%02X:00.0", (unsigned)(d - devices) + 1);
    return OK;
}
unsigned nvmlDeviceGetTopologyCommonAncestor(Device *d, Device *other, unsigned *to) {
    STRIKE(d, "topology");
    int a = (int)(d - devices), b = (int)(other - devices);
    *to = a / 2 == b / 2 ? 10 : a / 4 == b / 4 ? 40 : 50;
    return OK;
}
unsigned nvmlDeviceGetP2PStatus(Device *d, Device *other, unsigned index, unsigned *to) {
    STRIKE(d, "nvlink");
    *to = index == 2 && strstr(d->name, "SXM") && strstr(other->name, "SXM")
          && (d - devices) / 2 == (other - devices) / 2 ? 0 : 5;
    return OK;
}
enum { RESERVED = 300 << 20 };
static unsigned long long used(const Device *d) {
    unsigned long long sum = 0;
    for (int i = 0; i < d->process_count; i++) sum += d->processes[i].memory;
    return sum;
}
unsigned nvmlDeviceGetMemoryInfo(Device *d, unsigned long long *to) {
    STRIKE(d, "memory");
    to[0] = d->memory;
    to[2] = used(d) + RESERVED;
    to[1] = to[0] - to[2];
    return OK;
}
#ifndef OLD_DRIVER
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
unsigned nvmlDeviceGetMemoryInfo_v2(Device *d, Memory2 *to) {
    STRIKE(d, "memory");
    if (to->version != 0x02000028) return 25;
    to->total = d->memory;
    to->reserved = RESERVED;
    to->used = used(d);
    to->free = d->memory - RESERVED - to->used;
    return OK;
}
unsigned nvmlDeviceGetCurrentClocksEventReasons(Device *d, unsigned long long *to) {
    STRIKE(d, "throttle");
    *to = d->throttle | (d->process_count ? 0 : 1);
    return OK;
}
typedef struct {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type, code;
    unsigned long long value;
} FieldValue;
unsigned nvmlDeviceGetFieldValues(Device *d, int count, FieldValue *values) {
    STRIKE(d, "recovery");
    for (int i = 0; i < count; i++) {
        values[i].code = values[i].id == 230 ? OK : INVALID_ARGUMENT;
        values[i].type = 1;
        values[i].value = d->recovery;
    }
    return OK;
}
unsigned nvmlDeviceGetRemappedRows(Device *d, unsigned *corrected, unsigned *uncorrected,
                                   unsigned *pending, unsigned *failed) {
    STRIKE(d, "ecc");
    *corrected = *uncorrected = 0;
    *pending = d->remap_pending;
    *failed = d->remap_failed;
    return OK;
}
unsigned nvmlDeviceGetMigMode(Device *d, unsigned *current, unsigned *pending) {
    STRIKE(d, "mig");
    *current = *pending = (unsigned)d->mig;
    return OK;
}
#else
unsigned nvmlDeviceGetCurrentClocksThrottleReasons(Device *d, unsigned long long *to) {
    STRIKE(d, "throttle");
    *to = d->throttle | (d->process_count ? 0 : 1);
    return OK;
}
#endif
unsigned nvmlDeviceGetRetiredPagesPendingStatus(Device *d, unsigned *to) {
    STRIKE(d, "ecc");
    *to = 0;
    return OK;
}
unsigned nvmlDeviceGetUtilizationRates(Device *d, unsigned *to) {
    STRIKE(d, "utilization");
    to[0] = d->process_count ? 87 : 0;
    to[1] = d->process_count ? 40 : 0;
    return OK;
}
unsigned nvmlDeviceGetTemperature(Device *d, unsigned sensor, unsigned *to) {
    STRIKE(d, "temperature");
    *to = 41 + sensor;
    return OK;
}
unsigned nvmlDeviceGetPowerUsage(Device *d, unsigned *to) {
    STRIKE(d, "power");
    *to = 31500;
    return OK;
}
unsigned nvmlDeviceGetEnforcedPowerLimit(Device *d, unsigned *to) {
    STRIKE(d, "power");
    *to = d->power_limit_mw;
    return OK;
}
unsigned nvmlDeviceGetClockInfo(Device *d, unsigned clock, unsigned *to) {
    STRIKE(d, "clocks");
    *to = clock == 2 ? 715 : 1328;
    return OK;
}
unsigned nvmlDeviceGetTotalEccErrors(Device *d, unsigned kind, unsigned counter,
                                     unsigned long long *to) {
    STRIKE(d, "ecc");
    *to = kind == 1 && counter == 0 ? d->ecc : 0;
    return OK;
}

typedef struct { unsigned pid; unsigned long long memory; } Process1;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu, compute; } Process2;
#define PROCESS_LIST(symbol, type) \
    unsigned symbol(Device *d, unsigned *count, type *to) { \
        STRIKE(d, "processes"); \
        unsigned size = *count; \
        *count = (unsigned)d->process_count; \
        if (to && d->grow > 0) { d->grow--; return INSUFFICIENT_SIZE; } \
        if (size < *count) return INSUFFICIENT_SIZE; \
        for (unsigned i = 0; i < *count; i++) { \
            to[i].pid = d->processes[i].pid; \
            to[i].memory = d->processes[i].memory; \
        } \
        return OK; \
    }
#define NO_PROCESSES(symbol) \
    unsigned symbol(Device *d, unsigned *count, void *to) { \
        (void)to; \
        STRIKE(d, "processes"); \
        *count = 0; \
        return OK; \
    }
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, Process1)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
#ifndef ANCIENT_DRIVER
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, Process2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
#endif
#ifndef OLD_DRIVER
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, Process2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
#endif

typedef struct { Device *device; unsigned long long type, data; unsigned gpu, compute; } Event;
unsigned nvmlEventSetCreate(void **to) { *to = devices; return node_code; }
unsigned nvmlEventSetFree(void *set) { (void)set; return OK; }
unsigned nvmlDeviceRegisterEvents(Device *d, unsigned long long types, void *set) {
    (void)set;
    STRIKE(d, "events");
    d->watched = (types & 8) != 0;
    return OK;
}
unsigned nvmlEventSetWait_v2(void *set, Event *to, unsigned timeout_ms) {
    (void)set;
    (void)timeout_ms;
    for (int i = 0; i < xid_count; i++)
        if (!xids[i].taken && devices[xids[i].device].watched) {
            xids[i].taken = 1;
            to->device = &devices[xids[i].device];
            to->type = 8;
            to->data = xids[i].number;
            return OK;
        }
    return TIMEOUT;
}
