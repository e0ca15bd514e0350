package node

import "testing"

// TestNodeUsageIsOfOneScope: a node that has a part of its machine tells what
// its pods use, of CPU as of memory; any other what its machine does.
func TestNodeUsageIsOfOneScope(t *testing.T) {
	pods := func() (int64, uint64, bool) { return 3 << 20, 12345, true }
	bound := &HostMachine{Memory: 64 << 20, Pods: pods}
	if cpu, memory := bound.MachineUsage(); cpu != 12345 || memory != 3<<20 {
		t.Errorf("with a bound: %d ns, %d bytes", cpu, memory)
	}
	whole := &HostMachine{Pods: pods}
	if cpu, memory := whole.MachineUsage(); cpu == 12345 || cpu == 0 || memory == 3<<20 || memory == 0 {
		t.Errorf("without: %d ns, %d bytes", cpu, memory)
	}
	bound.Pods = func() (int64, uint64, bool) { return 0, 0, false }
	if cpu, memory := bound.MachineUsage(); cpu != 0 || memory != 0 {
		t.Errorf("without control groups: %d ns, %d bytes", cpu, memory)
	}
}
