package nodeapi

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// TestExtendedResourcesStay: a node's report takes away only what is its own.
func TestExtendedResourcesStay(t *testing.T) {
	list := func(kv ...string) corev1.ResourceList {
		l := corev1.ResourceList{}
		for i := 0; i < len(kv); i += 2 {
			l[corev1.ResourceName(kv[i])] = resource.MustParse(kv[i+1])
		}
		return l
	}
	cur := corev1.NodeStatus{
		Capacity:    list("cpu", "4", "hugepages-2Mi", "1", "example.com/dongle", "2", "example.com/both", "1"),
		Allocatable: list("cpu", "3", "example.com/dongle", "1"),
	}
	said := corev1.NodeStatus{Capacity: list("cpu", "2", "example.com/both", "7"), Allocatable: list("cpu", "1")}
	got := mergeNodeStatus(cur, said)
	for name, want := range map[string]string{"cpu": "2", "example.com/dongle": "2", "example.com/both": "7", "hugepages-2Mi": "0"} {
		if n := got.Capacity[corev1.ResourceName(name)]; n.String() != want {
			t.Errorf("capacity of %s: %s, want %s", name, &n, want)
		}
	}
	if n := got.Allocatable["example.com/dongle"]; n.String() != "1" {
		t.Errorf("allocatable: %s", &n)
	}
	if _, ok := said.Capacity["example.com/dongle"]; ok {
		t.Error("what the node said was changed")
	}
	if got := mergeNodeStatus(cur, corev1.NodeStatus{}); len(got.Capacity) != len(cur.Capacity) {
		t.Errorf("a report without capacity: %v", got.Capacity)
	}
}
