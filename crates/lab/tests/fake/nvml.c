/* An NVML that needs no GPU. $NVML_HOT is the number of the reading, from 1, at which heat slows the GPU down; 0 is every
 * one. The temperature is not supported, and the power limit's function does not exist, as in other driver versions. The
 * energy counter moves every 5 ms, as of 500 W, and is not supported where $NVML_NO_ENERGY is set. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int status;

status nvmlInit_v2(void) { return 0; }
status nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "999.1");
    return 0;
}
status nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)8;
    return strncmp(uuid, "GPU-", 4) == 0 ? 0 : 2;
}
status nvmlDeviceGetClockInfo(void *device, unsigned kind, unsigned *mhz) {
    *mhz = kind == 1 ? 1980 : 3201;
    return device ? 0 : 2;
}
status nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    *milliwatts = 350500;
    return device ? 0 : 2;
}
status nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *millijoules = (now.tv_sec * 200ULL + now.tv_nsec / 5000000) * 2500;
    return !device ? 2 : getenv("NVML_NO_ENERGY") ? 3 : 0;
}
status nvmlDeviceGetTemperature(void *device, unsigned kind, unsigned *celsius) {
    (void)device, (void)kind;
    *celsius = 12345;
    return 3;
}
status nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    static int reading;
    const char *hot = getenv("NVML_HOT");
    reading++;
    *reasons = hot && (atoi(hot) == 0 || atoi(hot) == reading) ? 0x40 : 0;
    return device ? 0 : 2;
}
