package oci

import (
	"testing"

	"github.com/dunlin-project/dunlin/runtime/conformance"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

func TestConformance(t *testing.T) {
	cfg, _ := config(t, "dunlin-test-oci-c")
	f := cfg.Cgroups.Facts()
	conformance.Run(t, conformance.Subject{
		Open: func(t *testing.T) workload.Runtime {
			r, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			return r
		},
		Image: "busybox", Program: []string{"guest"}, MemoryLimited: f.Memory, CPULimited: f.CPU, Execs: true,
	})
}
