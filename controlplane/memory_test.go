package controlplane

import "testing"

func TestRooms(t *testing.T) {
	for _, c := range []struct {
		memory  uint64
		ring    int64
		objects int
	}{
		{0, 32 << 20, 24 << 20},
		{128 << 20, 4 << 20, 4 << 20},
		{512 << 20, 8 << 20, 4 << 20},
		{1 << 30, 16 << 20, 8 << 20},
		{8 << 30, 32 << 20, 24 << 20},
	} {
		if ring, objects := rooms(c.memory); ring != c.ring || objects != c.objects {
			t.Errorf("%d MiB: ring %d, objects %d", c.memory>>20, ring, objects)
		}
	}
}
