package nodeapi

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/wire"
)

func TestMergePodStatus(t *testing.T) {
	early := metav1.NewTime(time.Unix(1000, 0))
	later := metav1.NewTime(time.Unix(2000, 0))
	cur := corev1.PodStatus{
		Phase: corev1.PodRunning, QOSClass: corev1.PodQOSBurstable, StartTime: &early,
		Conditions: []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: "True", LastTransitionTime: early},
			{Type: corev1.PodReady, Status: "True", LastTransitionTime: early},
			{Type: corev1.PodInitialized, Status: "True", LastTransitionTime: early},
			{Type: corev1.DisruptionTarget, Status: "True", Reason: "NodeUnreachable", LastTransitionTime: early},
			{Type: "example.com/gate", Status: "True", LastTransitionTime: early},
		},
	}
	said := corev1.PodStatus{
		Phase: corev1.PodRunning, StartTime: &later, PodIP: "10.42.0.7", QOSClass: "made up",
		Conditions: []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: "False", LastTransitionTime: later},
			{Type: corev1.PodReady, Status: "True", LastTransitionTime: later},
			{Type: corev1.ContainersReady, Status: "False", LastTransitionTime: later},
		},
	}
	out, err := mergePodStatus(&corev1.Pod{Status: cur}, &said)
	if err != nil {
		t.Fatal(err)
	}
	want := map[corev1.PodConditionType]struct {
		status corev1.ConditionStatus
		at     metav1.Time
	}{
		corev1.PodScheduled:     {"True", early}, // the scheduler's
		corev1.PodReady:         {"True", early}, // the same as before
		corev1.DisruptionTarget: {"True", early}, // another's
		"example.com/gate":      {"True", early}, // another's
		corev1.ContainersReady:  {"False", later},
	}
	if len(out.Conditions) != len(want) { // Initialized is the node's, and it dropped it
		t.Fatalf("conditions %+v", out.Conditions)
	}
	for _, c := range out.Conditions {
		if w := want[c.Type]; w.status != c.Status || !w.at.Equal(&c.LastTransitionTime) {
			t.Errorf("%s: %+v", c.Type, c)
		}
	}
	if out.QOSClass != corev1.PodQOSBurstable || !out.StartTime.Equal(&early) || out.PodIPs[0].IP != "10.42.0.7" {
		t.Errorf("status %+v", out)
	}
	again, err := mergePodStatus(&corev1.Pod{Status: out}, &said)
	if err != nil || !equality.Semantic.DeepEqual(again, out) {
		t.Errorf("not idempotent: %+v %v", again, err)
	}
}

func TestPhaseOnlyMovesForward(t *testing.T) {
	phases := []corev1.PodPhase{corev1.PodPending, corev1.PodRunning, corev1.PodSucceeded, corev1.PodFailed}
	rank := map[corev1.PodPhase]int{corev1.PodPending: 0, corev1.PodRunning: 1, corev1.PodSucceeded: 2, corev1.PodFailed: 2}
	for _, from := range phases {
		for _, to := range phases {
			_, err := mergePodStatus(&corev1.Pod{Status: corev1.PodStatus{Phase: from}}, &corev1.PodStatus{Phase: to})
			if ok := from == to || rank[to] > rank[from]; ok != (err == nil) {
				t.Errorf("%s to %s: %v", from, to, err)
			}
		}
	}
}

// Whatever the node writes into a status, the assignment stays the same.
func TestOwnStatusIsNotContent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "n", UID: "u"}}
		before, err := encodeFor(pod)
		if err != nil {
			t.Fatal(err)
		}
		said := corev1.PodStatus{
			Phase:             rapid.SampledFrom([]corev1.PodPhase{corev1.PodPending, corev1.PodRunning}).Draw(t, "phase"),
			PodIP:             rapid.SampledFrom([]string{"", "10.0.0.1"}).Draw(t, "ip"),
			ContainerStatuses: []corev1.ContainerStatus{{Name: "c", RestartCount: rapid.Int32().Draw(t, "restarts")}},
			Conditions: []corev1.PodCondition{{
				Type:   rapid.SampledFrom([]corev1.PodConditionType{corev1.PodReady, corev1.ContainersReady, corev1.PodInitialized}).Draw(t, "type"),
				Status: rapid.SampledFrom([]corev1.ConditionStatus{"True", "False"}).Draw(t, "status"),
			}},
		}
		next := pod.DeepCopy()
		next.ResourceVersion = "7"
		if next.Status, err = mergePodStatus(pod, &said); err != nil {
			t.Fatal(err)
		}
		after, err := encodeFor(next)
		if err != nil {
			t.Fatal(err)
		}
		if string(before) != string(after) {
			t.Fatal("the node's own status is part of the assignment")
		}
		next.Status.Conditions = append(next.Status.Conditions, corev1.PodCondition{Type: "example.com/gate", Status: "True"})
		if b, _ := encodeFor(next); string(b) == string(after) {
			t.Fatal("another's condition is not part of the assignment")
		}
	})
}

func TestMergeNodeConditions(t *testing.T) {
	at := func(s int64) metav1.Time { return metav1.NewTime(time.Unix(s, 0)) }
	cur := []corev1.NodeCondition{
		{Type: corev1.NodeReady, Status: "True", Reason: "r", LastHeartbeatTime: at(1), LastTransitionTime: at(1)},
		{Type: "example.com/x", Status: "True", LastTransitionTime: at(1)},
	}
	same := mergeConditions(cur, []corev1.NodeCondition{{Type: corev1.NodeReady, Status: "True", Reason: "r", LastHeartbeatTime: at(9), LastTransitionTime: at(9)}})
	if !equality.Semantic.DeepEqual(same, cur) {
		t.Errorf("a repeated report changes something: %+v", same)
	}
	out := mergeConditions(cur, []corev1.NodeCondition{{Type: corev1.NodeReady, Status: "True", Reason: "other", LastTransitionTime: at(9)}})
	if out[0].Reason != "other" || out[0].LastTransitionTime != at(1) || len(out) != 2 {
		t.Errorf("%+v", out)
	}
}

func TestNodeLabels(t *testing.T) {
	cur := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"topology.kubernetes.io/zone": "set-by-admin", "dunlin.dev/x": "old"}}}
	said := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{
		"topology.kubernetes.io/zone": "own", "dunlin.dev/x": "new", "node-role.kubernetes.io/control-plane": "", "rack": "7",
		"a.node-restriction.kubernetes.io/x": "y",
	}}}
	if !mergeNodeMeta(cur, said) {
		t.Fatal("nothing changed")
	}
	want := map[string]string{"topology.kubernetes.io/zone": "set-by-admin", "dunlin.dev/x": "new", "rack": "7"}
	if !equality.Semantic.DeepEqual(cur.Labels, want) {
		t.Fatalf("%v", cur.Labels)
	}
	if mergeNodeMeta(cur, said) {
		t.Fatal("not idempotent")
	}
}

func TestNextFree(t *testing.T) {
	taken := map[string]bool{}
	is := func(p netip.Prefix) bool { return taken[p.String()] }
	p := netip.MustParsePrefix("10.42.0.0/22")
	var from netip.Addr
	for _, want := range []string{"10.42.0.0/24", "10.42.1.0/24", "10.42.2.0/24", "10.42.3.0/24"} {
		got, ok := nextFree(p, 24, from, is)
		if !ok || got.String() != want {
			t.Fatalf("got %v %v, want %s", got, ok, want)
		}
		taken[want] = true
		from, _ = addBit(got.Addr(), 24)
	}
	if got, ok := nextFree(p, 24, from, is); ok {
		t.Fatalf("a fifth range: %v", got)
	}
	delete(taken, "10.42.1.0/24")
	for _, from := range []string{"10.42.0.0", "10.42.1.0", "10.42.3.0", "10.42.4.0"} {
		if got, ok := nextFree(p, 24, netip.MustParseAddr(from), is); !ok || got.String() != "10.42.1.0/24" {
			t.Fatalf("not given again, looking from %s: %v", from, got)
		}
	}
	for _, c := range []struct{ in, from, taken, want string }{
		{"255.255.0.0/16", "255.255.255.0", "", "255.255.255.0/24"},
		{"255.255.0.0/16", "255.255.255.0", "255.255.255.0/24", "255.255.0.0/24"},
		{"fd42::/56", "", "fd42::/64", "fd42:0:0:1::/64"},
		{"10.0.0.0/16", "", "10.0.0.0/26", "10.0.0.64/26"},
	} {
		var from netip.Addr
		if c.from != "" {
			from = netip.MustParseAddr(c.from)
		}
		got, ok := nextFree(netip.MustParsePrefix(c.in), netip.MustParsePrefix(c.want).Bits(), from, func(p netip.Prefix) bool { return p.String() == c.taken })
		if !ok || got.String() != c.want {
			t.Errorf("%+v: %v %v", c, got, ok)
		}
	}
}

func TestCleanName(t *testing.T) {
	for in, want := range map[string]string{
		"Rpi_Node1": "rpi-node1", "raspberrypi": "raspberrypi", "a.b.C.": "a.b.c", "-x-": "x", "": "", "___": "", "Größe": "gr--e", "localhost": "localhost",
	} {
		if got := CleanName(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		n := CleanName(rapid.String().Draw(t, "name"))
		if len(n) > 63 || CleanName(n) != n {
			t.Fatalf("%q", n)
		}
	})
}

func TestPodTokens(t *testing.T) {
	auto, short := int64(autoExpiration), int64(600)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "u", Namespace: "n", Name: "p"}}
	pod.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
		{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{ExpirationSeconds: &auto}},
		{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{ExpirationSeconds: &short, Audience: "vault"}},
	}}}}}
	w := podTokens(pod)
	if len(w) != 2 || w[0].life != autoLife || w[1].life != 10*time.Minute || w[0].uid == w[1].uid || w[1].uid != wire.TokenSecretName("u", "vault", 600) {
		t.Fatalf("%+v", w)
	}
	now := time.Unix(1_000_000, 0)
	for left, due := range map[time.Duration]bool{10 * time.Minute: false, 3 * time.Minute: false, time.Minute: true, -time.Hour: true, 24 * time.Hour: true} {
		if got := w[1].due(now.Add(left).Unix(), now); got != due {
			t.Errorf("%v left: due %v", left, got)
		}
	}
}

func TestPortsText(t *testing.T) {
	got, err := portsText(map[int32]int32{9090: 30001, 8080: 30000})
	if err != nil || got != `{"8080":30000,"9090":30001}` {
		t.Fatalf("%q, %v", got, err)
	}
	for _, bad := range []map[int32]int32{{0: 1}, {80: 0}, {80: 70000}, {-1: 80}} {
		if _, err := portsText(bad); err == nil {
			t.Fatalf("%v is taken", bad)
		}
	}
}

// A pod that a restored state shows as Running, and that its node holds back,
// keeps its phase and is not Ready; nothing else goes back to Pending.
func TestHeldBackPodKeepsItsPhase(t *testing.T) {
	pod := &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.42.0.7", Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: "True"}}}}
	said := &corev1.PodStatus{
		Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: "False"}},
		ContainerStatuses: []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: manifests.ReasonHeldAfterRestore}}}},
	}
	out, err := mergePodStatus(pod, said)
	if err != nil || out.Phase != corev1.PodRunning || out.PodIP != "" || out.Conditions[0].Status != "False" || said.Phase != corev1.PodPending {
		t.Errorf("%+v, %v", out, err)
	}
	said.ContainerStatuses[0].State.Waiting.Reason = "ContainerCreating"
	if _, err := mergePodStatus(pod, said); !errors.Is(err, errArrow) {
		t.Errorf("back to Pending: %v", err)
	}
}
