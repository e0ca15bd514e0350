package serviceaccount

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// Namespaces come and go, people delete and change what is in them, and the
// leader dies anywhere: every living namespace gets its ServiceAccount and its
// CA, one that ends gets nothing any more, and what a user added to the
// account stays.
func TestEveryNamespaceThroughKills(t *testing.T) {
	const pem = "the CA"
	rapid.Check(t, func(rt *rapid.T) {
		w := fixture.New(t)
		ended := map[string]bool{} // namespaces that end, without one of ours
		mine := map[string]bool{}  // whose account a user changed
		has := func(ns string) (account *corev1.ServiceAccount, ca *corev1.ConfigMap) {
			if o, err := w.Store.Get(accountGK, ns, accountName); err == nil {
				account, _ = o.(*corev1.ServiceAccount)
			}
			if o, err := w.Store.Get(configMapGK, ns, rootCAName); err == nil {
				ca, _ = o.(*corev1.ConfigMap)
			}
			return account, ca
		}
		check := func() error {
			for ns := range ended {
				if a, c := has(ns); a != nil || c != nil {
					return fmt.Errorf("something is made in %s, which ends", ns)
				}
			}
			return nil
		}
		reign := w.Reign(rt, check, func(env loop.Env) []*loop.Controller {
			return []*loop.Controller{New(env), NewRootCA(env, []byte(pem))}
		})
		made := []string{"default"}
		for i := range rapid.IntRange(3, 25).Draw(rt, "steps") {
			ns := rapid.SampledFrom(made).Draw(rt, "namespace")
			account, ca := has(ns)
			switch step := rapid.IntRange(0, 7).Draw(rt, "step"); {
			case step == 0:
				reign.Elect(rapid.IntRange(0, 4).Draw(rt, "writes"))
				reign.Work()
			case step == 1:
				reign.Work()
			case step == 2:
				made = append(made, fmt.Sprintf("ns%d", i))
				w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: made[len(made)-1]}})
			case step == 3 && ns != "default" && !ended[ns] && account == nil && ca == nil:
				w.Delete(fixture.Namespace, "", ns, "") // its finalizer keeps it
				ended[ns] = true
			case step == 4 && account != nil:
				w.Delete(accountGK, ns, accountName, "")
				delete(mine, ns)
			case step == 5 && account != nil:
				fixture.Change(w, accountGK, ns, accountName, registry.Main, func(a *corev1.ServiceAccount) {
					a.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "mine"}}
				})
				mine[ns] = true
			case step == 6 && ca != nil:
				w.Delete(configMapGK, ns, rootCAName, "")
			case step == 7 && ca != nil:
				fixture.Change(w, configMapGK, ns, rootCAName, registry.Main, func(c *corev1.ConfigMap) { c.Data = map[string]string{"other": "thing"} })
			}
		}
		reign.Finish()
		for _, ns := range made {
			account, ca := has(ns)
			switch {
			case ended[ns]:
			case account == nil || ca == nil:
				rt.Fatalf("%s: account %v, CA %v", ns, account, ca)
			case ca.Data[rootCAKey] != pem || len(ca.Data) != 1:
				rt.Fatalf("%s: CA %v", ns, ca.Data)
			case mine[ns] && len(account.ImagePullSecrets) != 1:
				rt.Fatalf("%s: the user's pull secret is gone", ns)
			}
			if _, err := w.Store.Get(fixture.Namespace, "", ns); apierrors.IsNotFound(err) {
				rt.Fatalf("%s is gone", ns)
			}
		}
	})
}
