// Command informer keeps client-go informers running against a server and
// checks, at the end, that nothing was missed: it creates and deletes
// ConfigMaps all the while, the server may restart under it, and the
// informer's last view must equal a fresh list.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	kubeconfig := flag.String("kubeconfig", os.Getenv("KUBECONFIG"), "kubeconfig")
	length := flag.Duration("for", time.Minute, "how long to run")
	flag.Parse()
	if err := run(*kubeconfig, *length); err != nil {
		fmt.Fprintln(os.Stderr, "informer:", err)
		os.Exit(1)
	}
}

func run(kubeconfig string, length time.Duration) error {
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	cfg.QPS, cfg.Burst = 50, 100
	cs, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), length+2*time.Minute)
	defer cancel()
	const ns = "default"
	f := informers.NewSharedInformerFactoryWithOptions(cs, 0, informers.WithNamespace(ns))
	inf := f.Core().V1().ConfigMaps().Informer()
	pods := f.Core().V1().Pods().Informer()
	var added, updated, deleted atomic.Int64
	if _, err := inf.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { added.Add(1) },
		UpdateFunc: func(any, any) { updated.Add(1) },
		DeleteFunc: func(any) { deleted.Add(1) },
	}); err != nil {
		return err
	}
	f.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), inf.HasSynced, pods.HasSynced) {
		return fmt.Errorf("caches did not sync")
	}
	fmt.Println("synced")
	writes, refused := churn(ctx, cs, ns, length)
	fmt.Printf("writes %d, refused while the server was away %d\n", writes, refused)
	if writes == 0 {
		return fmt.Errorf("not one write went through")
	}
	if err := compare(ctx, cs, ns, inf.GetStore()); err != nil {
		return err
	}
	fmt.Printf("seen: %d added, %d updated, %d deleted; the view equals a fresh list\n", added.Load(), updated.Load(), deleted.Load())
	return nil
}

func churn(ctx context.Context, cs kubernetes.Interface, ns string, length time.Duration) (writes, refused int) {
	end := time.After(length)
	t := time.NewTicker(100 * time.Millisecond)
	defer t.Stop()
	for i := 0; ; i++ {
		select {
		case <-end:
			return writes, refused
		case <-ctx.Done():
			return writes, refused
		case <-t.C:
		}
		name := fmt.Sprintf("informer-%d", i%20)
		var err error
		switch (i / 20) % 3 {
		case 0:
			_, err = cs.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"made-by": "informer"}}}, metav1.CreateOptions{})
		case 1:
			var cm *corev1.ConfigMap
			if cm, err = cs.CoreV1().ConfigMaps(ns).Get(ctx, name, metav1.GetOptions{}); err == nil {
				cm.Data = map[string]string{"i": fmt.Sprint(i)}
				_, err = cs.CoreV1().ConfigMaps(ns).Update(ctx, cm, metav1.UpdateOptions{})
			}
		case 2:
			err = cs.CoreV1().ConfigMaps(ns).Delete(ctx, name, metav1.DeleteOptions{})
		}
		if err != nil {
			refused++
			continue
		}
		writes++
	}
}

// compare waits until the informer's store equals a fresh list.
func compare(ctx context.Context, cs kubernetes.Interface, ns string, store cache.Store) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	t := time.NewTicker(200 * time.Millisecond)
	defer t.Stop()
	for {
		l, err := cs.CoreV1().ConfigMaps(ns).List(ctx, metav1.ListOptions{})
		diff := ""
		if err == nil {
			diff = difference(l.Items, store)
			if diff == "" {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the informer's view differs from a list: %s (%v)", diff, err)
		case <-t.C:
		}
	}
}

func difference(items []corev1.ConfigMap, store cache.Store) string {
	if n := len(store.ListKeys()); n != len(items) {
		return fmt.Sprintf("%d in view, %d listed", n, len(items))
	}
	for i := range items {
		o, ok, err := store.GetByKey(items[i].Namespace + "/" + items[i].Name)
		if err != nil || !ok {
			return "missing " + items[i].Name
		}
		if o.(*corev1.ConfigMap).ResourceVersion != items[i].ResourceVersion {
			return "stale " + items[i].Name
		}
	}
	return ""
}
