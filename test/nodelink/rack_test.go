package nodelink

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// A rack that is switched on joins with one line, all at once: nobody is
// refused, everybody has ranges of their own, the token's Secret does not
// grow with the rack, and who lost the answer long ago may ask again.
func TestRackJoinsAtOnce(t *testing.T) {
	const rack = 48
	s := start(t, options{ns: true})
	line, err := s.api.CreateToken(t.Context(), nodeapi.TokenOptions{Uses: rack}, nil)
	must(t, err)
	ids := make([]*pki.NodeIdentity, rack)
	join := func(i int) error {
		return link.Join(t.Context(), link.JoinConfig{Line: line, Identity: ids[i], Name: fmt.Sprintf("n%d", i)})
	}
	var wg sync.WaitGroup
	for i := range rack {
		ids[i], err = pki.OpenNodeIdentity(t.TempDir())
		must(t, err)
		wg.Go(func() {
			if err := join(i); err != nil {
				t.Errorf("node %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	cidrs := map[string]bool{}
	for i := range rack {
		c := s.node(fmt.Sprintf("n%d", i)).Spec.PodCIDR
		if _, err := netip.ParsePrefix(c); err != nil || cidrs[c] {
			t.Errorf("node %d: range %q, seen before: %v", i, c, cidrs[c])
		}
		cidrs[c] = true
	}
	o, err := s.store.Get(schema.GroupKind{Kind: "Secret"}, "kube-system", "join-token-"+line.ID)
	must(t, err)
	sec, _ := o.(*corev1.Secret)
	if n := strings.Count(string(sec.Data["used-by"]), ",") + 1; n >= rack || string(sec.Data["uses-left"]) != "0" {
		t.Errorf("%d users kept, %s uses left", n, sec.Data["uses-left"])
	}
	for i := range rack {
		if err := join(i); err != nil {
			t.Errorf("node %d again: %v", i, err)
		}
	}
}

// An answer that was lost on its way is given again, token included, and is
// the same generation: the node does not write twice.
func TestLostAnswerIsGivenAgain(t *testing.T) {
	s := start(t, options{ns: true, tokens: &fakeTokens{}})
	s.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "default"}})
	a := runLink(t, s.join("n1"), nil)
	seconds := int64(600)
	p := boundPod("p", "n1")
	p.Spec.ServiceAccountName = "default"
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "t", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token", ExpirationSeconds: &seconds}}},
	}}})
	s.create(p)
	eventually(t, "connected", a.Connected)
	name := wire.TokenSecretName(string(s.pod("p").UID), "", seconds)
	pull := func() (generation, version uint64) {
		t.Helper()
		asg, err := a.Pull(t.Context(), wire.PullRequest{})
		must(t, err)
		for _, o := range asg.Objects {
			if o.UID == name && len(o.Data) > 0 {
				return asg.Generation, o.ResourceVersion
			}
		}
		t.Fatalf("no token among %d objects", len(asg.Objects))
		return 0, 0
	}
	gen, version := pull()
	if g, v := pull(); g != gen || v != version {
		t.Errorf("generation %d, token %d; then %d, %d", gen, version, g, v)
	}
}
